"""Every format against the library that defines its checkpoint: compressed-tensors, or bitsandbytes. NVFP4 has a file
of its own.
"""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from registry.quantization import BF16, FORMATS, FP8, MXFP4, NF4, Int4, Int8, QuantFormat, packing
from registry.quantization.packing import nibbles

COMPRESSED = [MXFP4(), Int4(), Int4(32), Int4(None), Int8(), Int8(128), FP8()]
NAMES = [f"{type(f).__name__}-{f.group_size}" for f in COMPRESSED]


def weight(rows: int = 24, columns: int = 256, seed: int = 0) -> Tensor:
    """BF16, as those of models; rows of very different size, one group of zeros."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** (2 * torch.randn(rows, 1, generator=generator))
    out = (torch.randn(rows, columns, generator=generator) * scale).bfloat16()
    out[0, :128] = 0
    return out


def scheme(format_: QuantFormat) -> Any:
    """What compressed-tensors reads in the format's ``config``."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors: pip install llmcompressor")
    from compressed_tensors.quantization import QuantizationConfig

    return QuantizationConfig.model_validate(format_.config).config_groups["group_0"]


def compressed(format_: QuantFormat, dense: Tensor) -> dict[str, Tensor]:
    """compressed-tensors' scales (those of a minmax observer) and its compressor, in FP32 as ours."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    args = scheme(format_).weights
    parts = dense.float().view(len(dense), -1, args.group_size or dense.shape[1])
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
    if args.scale_dtype is None:
        scale = scale.bfloat16().float()  # as stored
    compressor = BaseCompressor.load_from_registry(format_.config["format"])  # type: ignore[index]
    state = {"weight": dense.float(), "weight_scale": scale, "weight_zero_point": zero}
    return dict(compressor.compress(state, scheme(format_)))


@pytest.mark.parametrize("format_", COMPRESSED, ids=NAMES)
def test_stored_bytes_are_those_of_compressed_tensors(format_: QuantFormat) -> None:
    dense = weight()
    (ours,), theirs = format_.quantize([dense]), compressed(format_, dense)
    assert ours.keys() == theirs.keys()
    filled = torch.ones_like(theirs["weight_scale"], dtype=torch.bool)
    filled[0, : filled.shape[1] * 128 // 256] = False  # it stores an arbitrary scale for zeros; we store 0
    assert torch.equal(ours["weight_scale"].float()[filled], theirs["weight_scale"].float()[filled])
    for key in ours.keys() - {"weight_scale"}:
        stored = theirs[key]
        if isinstance(format_, MXFP4):  # codes of −0 and +0 may differ
            values = (*range(8), 0, *range(-1, -8, -1))
            assert torch.equal(*(nibbles(packed, tuple(map(float, values))) for packed in (ours[key], stored)))
        else:
            assert ours[key].dtype == stored.dtype
            assert torch.equal(ours[key].view(torch.uint8), stored.view(torch.uint8))


@pytest.mark.parametrize("format_", COMPRESSED, ids=NAMES)
def test_dense_weights_are_those_of_compressed_tensors(format_: QuantFormat) -> None:
    from compressed_tensors.compressors.base import BaseCompressor

    (stored,) = format_.quantize([weight()])
    compressor = BaseCompressor.load_from_registry(format_.config["format"])  # type: ignore[index]
    theirs = compressor.decompress(dict(stored), scheme(format_))["weight"]
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(format_.dequantize(stored, torch.bfloat16), theirs)
    exact = format_.dequantize(stored, torch.float32)  # no rounding to BF16 hides a difference
    wide = {key: t.float() if key == "weight_scale" and t.is_floating_point() else t for key, t in stored.items()}
    if not isinstance(format_, MXFP4):  # whose scales have no other dtype, and whose numbers are exact in BF16
        theirs = compressor.decompress(wide, scheme(format_))["weight"]
    assert torch.equal(exact, theirs.float())


PRESETS = [(MXFP4(), "MXFP4A16"), (Int4(), "W4A16"), (Int8(128), "W8A16"), (Int8(), "INT8"), (FP8(), "FP8_DYNAMIC")]


@pytest.mark.parametrize(("format_", "preset"), PRESETS, ids=[preset for _, preset in PRESETS])
def test_config_is_that_of_the_preset(format_: QuantFormat, preset: str) -> None:
    ours = scheme(format_).weights
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    theirs = preset_name_to_scheme(preset, targets=["Linear"]).weights  # of the last two, without their activations
    assert ours.model_dump(exclude={"observer"}) == theirs.model_dump(exclude={"observer"})


@pytest.mark.parametrize("format_", COMPRESSED, ids=NAMES)
def test_rounding_is_that_of_llm_compressor(format_: QuantFormat) -> None:
    """Its own observer finds the same scales. It divides in BF16, ours in FP32: some codes differ by a step."""
    pytest.importorskip("llmcompressor", reason="needs llm-compressor: pip install 'qerl-pl[quantize]'")
    from compressed_tensors.compressors.base import BaseCompressor
    from llmcompressor.observers import Observer

    dense, args = weight()[1:], scheme(format_).weights
    module = torch.nn.Linear(dense.shape[1], len(dense), bias=False)
    module.weight.data = dense
    module.quantization_scheme = scheme(format_)
    observer = Observer.load_from_registry("minmax", base_name="weight", args=args, module=module)
    observer(dense)
    found = observer.get_qparams()
    state = {"weight": dense, "weight_scale": found["scale"], "weight_zero_point": found["zero_point"]}
    compressor = BaseCompressor.load_from_registry(format_.config["format"])  # type: ignore[index]
    theirs = compressor.compress(state, scheme(format_))
    (ours,) = format_.quantize([dense])
    same = (ours["weight_scale"].float() / theirs["weight_scale"].float() - 1).abs()
    assert same.max() <= 2**-7  # one step of BF16
    a, b = (format_.dequantize(stored, torch.float32) for stored in (ours, dict(theirs)))
    assert (a - b).norm() < 0.05 * b.norm()


def test_nf4_is_that_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes").functional
    dense = weight()
    (ours,) = NF4().quantize([dense])
    packed, state = functional.quantize_4bit(dense, blocksize=64, quant_type="nf4")
    theirs = {"weight": packed} | {f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}
    assert ours.keys() == theirs.keys()
    for key, stored in theirs.items():
        assert ours[key].dtype == stored.dtype
        assert torch.equal(ours[key], stored), key
    for dtype in (torch.bfloat16, torch.float32):
        state.dtype = dtype
        assert torch.equal(NF4().dequantize(ours, dtype), functional.dequantize_4bit(packed, state))


def test_nf4_by_hand() -> None:
    block = torch.zeros(1, 64)
    block[0, :4] = torch.tensor([-2.0, 2.0, 0.17, 0.15])  # of 2: −1, 1, 0.085, 0.075; the quantile after 0 is 0.0796
    (stored,) = NF4().quantize([block])
    assert stored["weight"].flatten().tolist() == [0x0F, 0x88, *[0x77] * 30]
    assert stored["weight.absmax"].tolist() == [2.0]
    expected = torch.tensor([-2.0, 2.0, 2 * 0.07958029955625534, 2 * 0.07958029955625534, 0.0])
    assert torch.equal(NF4().dequantize(stored, torch.float32)[0, :5], expected)


def test_mxfp4_by_hand() -> None:
    groups = torch.zeros(1, 96)
    groups[0, 0], groups[0, 32:35], groups[0, 64] = 6.9, torch.tensor([7.0, 3.0, -1.0]), 0.75
    (stored,) = MXFP4().quantize([groups])
    # 6.9 = 1.725 · 2^2 keeps its exponent 2, 7 = 1.75 · 2^2 takes the next; less two, and 127 for zero.
    assert stored["weight_scale"].tolist() == [[127, 128, 124]]
    back = MXFP4().dequantize(stored, torch.float32)
    assert back[0, 0] == 6.0 and back[0, 32:35].tolist() == [8.0, 3.0, -1.0] and back[0, 64] == 0.75


def test_int4_by_hand() -> None:
    row = torch.zeros(1, 32)
    row[0, :8] = torch.tensor([15.0, -15.0, 2.0, -2.0, 3.0, 0.9, -5.0, 13.0])
    (stored,) = Int4(32).quantize([row])
    assert stored["weight_scale"].tolist() == [[2.0]]
    # in steps of 2: 7.5 -> 8, of which 7 is left; −7.5 -> −8; 1; −1; 1.5 -> 2; 0.45 -> 0; −2.5 -> −2; 6.5 -> 6
    codes = [q + 8 for q in (7, -8, 1, -1, 2, 0, -2, 6)]
    word = sum(code << 4 * i for i, code in enumerate(codes))
    assert stored["weight_packed"][0, 0].item() % (1 << 32) == word
    assert Int4(32).dequantize(stored, torch.float32)[0, :8].tolist() == [14.0, -16.0, 2.0, -2.0, 4.0, 0.0, -4.0, 12.0]


@pytest.mark.parametrize("name", list(FORMATS))
def test_layout_matches_what_is_stored(name: str) -> None:
    format_ = FORMATS[name]()
    (stored,) = format_.quantize([torch.randn(6, 256)])
    assert {k: (tuple(t.shape), t.dtype) for k, t in stored.items()} == format_.layout(6, 256)
    assert format_.shape(stored) == (6, 256)


@pytest.mark.parametrize("format_", [*(FORMATS[name]() for name in FORMATS), Int4(32), Int8(64)], ids=str)
def test_bits_per_weight(format_: QuantFormat) -> None:
    sizes = [64, 4096]
    (stored,) = format_.quantize([torch.randn(*sizes)])
    bits = 8 * sum(t.nbytes for t in stored.values()) / (64 * 4096)
    assert bits == pytest.approx(format_.bits_per_weight, abs=0.01)  # constants, and scales of rows


@pytest.mark.parametrize("name", list(FORMATS))
def test_rows_are_dequantized_in_parts_without_a_seam(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from registry.quantization import packing

    (stored,) = FORMATS[name]().quantize([weight()])
    whole = FORMATS[name]().dequantize(stored, torch.bfloat16)
    monkeypatch.setattr(packing, "_AT_ONCE", 7 * 256)  # 24 rows: 7, 7, 7 and 3
    assert torch.equal(FORMATS[name]().dequantize(stored, torch.bfloat16), whole)


@pytest.mark.parametrize("name", list(FORMATS))
def test_numbers_do_not_depend_on_the_default_dtype(name: str) -> None:
    """vLLM loads models with BF16 as PyTorch's default; tables made then must not be rounded, nor be kept so."""
    weight = torch.randn(4, 256, generator=torch.Generator().manual_seed(0)) * 0.05

    def filled() -> list[Tensor]:
        tensors = []
        for key, (shape, dtype) in FORMATS[name]().layout(4, 256).items():
            tensors.append(torch.empty(shape, dtype=dtype))
            FORMATS[name]().fill_random(key, tensors[-1], (4, 256), 0.02, torch.Generator().manual_seed(0))
        return tensors

    drawn = filled()
    [want] = FORMATS[name]().quantize([weight])
    exact = FORMATS[name]().dequantize(want, torch.float32)
    packing._pairs.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        [stored] = FORMATS[name]().quantize([weight])
        dense = FORMATS[name]().dequantize(stored, torch.float32)
        again = filled()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(stored[key].view(torch.uint8), tensor.view(torch.uint8)) for key, tensor in want.items())
    assert torch.equal(dense, exact)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(drawn, again, strict=True))
    assert torch.equal(FORMATS[name]().dequantize(want, torch.float32), exact)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"bf16"}))
def test_zeros_stay_zero(name: str) -> None:
    (stored,) = FORMATS[name]().quantize([torch.zeros(2, 256)])
    assert torch.equal(FORMATS[name]().dequantize(stored, torch.float32), torch.zeros(2, 256))


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"down_proj: input dimension 448 is not a multiple of 128, .* group_size"):
        Int4().check("down_proj", 448)
    with pytest.raises(ValueError, match=r"group_size: 12 must be a positive multiple of 8, the codes of a word"):
        Int4(12)
    with pytest.raises(ValueError, match=r"group_size: 0 must"):
        Int8(0)
    with pytest.raises(ValueError, match="not a multiple of 64, which NF4 needs"):
        NF4().check("q_proj", 96)


def test_configs_are_json() -> None:
    for name in FORMATS:
        config = FORMATS[name]().config
        assert json.loads(json.dumps(config)) == config
    assert BF16().config is None
