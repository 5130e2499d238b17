"""Checkpoints: what is found, what is written, and what llm-compressor makes."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl_pl.checkpoint import Weights, is_projection, prepare, projection, resolve, stored_projection
from qerl_pl.model import build_model
from qerl_pl.packed import PackedLinear
from qerl_pl.stored import check_round_trip
from registry.quantization import BF16, FORMATS, FP8, MXFP4, NF4, NVFP4, Int4, Int8
from tests.reference import dequantize_nvfp4, llama, qwen2, write_checkpoint


def projections(folder: Path) -> list[str]:
    return sorted({n.rpartition(".")[0] for n in Weights(folder) if n.endswith(".weight_packed")})


def test_a_bf16_model_is_rounded_once(tmp_path):
    dense = write_checkpoint(tmp_path / "model", llama(), BF16())
    folder = prepare(str(tmp_path / "model"), NVFP4(), tmp_path / "cache")
    stamp = (folder / "config.json").stat().st_mtime_ns
    assert prepare(str(tmp_path / "model"), NVFP4(), tmp_path / "cache") == folder
    assert (folder / "config.json").stat().st_mtime_ns == stamp
    assert prepare(str(folder), NVFP4(), tmp_path / "cache") == folder  # quantized already
    weights = Weights(folder)
    assert len(projections(folder)) == 2 * 7
    for layer in range(2):
        names = [f"model.layers.{layer}.self_attn.{p}_proj" for p in "qkv"]
        assert len({weights[f"{n}.weight_global_scale"].item() for n in names}) == 1  # fused layers share it
        for name in names:
            parts = {k: weights[f"{name}.{k}"] for k in ("weight_packed", "weight_scale", "weight_global_scale")}
            error = (dequantize_nvfp4(parts) - dense[f"{name}.weight"]).norm() / dense[f"{name}.weight"].norm()
            assert 0.05 < error < 0.15
    untouched = {n for n in dense if not n.removesuffix(".weight").endswith("_proj")}
    assert all(torch.equal(weights[n].float(), dense[n]) for n in untouched)
    assert json.loads((folder / "config.json").read_text())["quantization_config"] == NVFP4().config
    assert (folder / "tokenizer.json").is_file()
    assert not [f for f in (tmp_path / "cache").iterdir() if f != folder]  # nothing unfinished is left


def test_a_changed_model_is_quantized_again(tmp_path):
    write_checkpoint(tmp_path / "model", qwen2(), BF16())
    first = prepare(str(tmp_path / "model"), NVFP4(), tmp_path / "cache")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    assert prepare(str(tmp_path / "model"), NVFP4(), tmp_path / "cache") != first


def test_the_format_must_be_that_of_the_checkpoint(tmp_path):
    write_checkpoint(tmp_path / "model", qwen2(), NVFP4())
    with pytest.raises(ValueError, match=r"is stored as 'nvfp4-pack-quantized, 4-bit float groups of 16', .*: bf16"):
        prepare(str(tmp_path / "model"), BF16())


@pytest.mark.parametrize(
    ("stored", "asked", "fix"),
    [
        (NVFP4(), BF16(), "set model.quantization: nvfp4"),
        (NVFP4(), Int4(), "set model.quantization: nvfp4"),
        (Int4(32), NVFP4(), "set model.quantization: int4 and model.quantization.group_size: 32"),
        (Int4(32), Int4(64), "set model.quantization: int4 and model.quantization.group_size: 32"),
        (Int4(None), Int4(64), "set model.quantization: int4 and model.quantization.group_size: null"),
        (Int8(), FP8(), "set model.quantization: int8"),
        (FP8(), Int8(), "set model.quantization: fp8"),
        (NF4(), MXFP4(), "set model.quantization: nf4"),
        (MXFP4(), NF4(), "set model.quantization: mxfp4"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_the_format_that_would_fit_is_named(stored, asked, fix, tmp_path):
    config = json.loads((resolve("tiny") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": stored.config}))
    with pytest.raises(ValueError, match=re.escape(f"; {fix}") + "$"):
        prepare(str(tmp_path), asked)


@pytest.mark.parametrize("changed", [{"symmetric": False}, {"group_size": 12, "strategy": "group"}])
def test_a_format_that_nothing_reads(changed, tmp_path):
    found = Int4(32).config
    found["config_groups"]["group_0"]["weights"] |= changed
    config = json.loads((resolve("tiny") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": found}))
    with pytest.raises(ValueError, match=r"no registered format reads it \(bf16, .*\); name the BF16 model that it"):
        prepare(str(tmp_path), NVFP4())


def test_no_format_is_named_where_all_would_refuse(tmp_path):
    found = FP8().config
    found["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "float"}
    config = json.loads((resolve("tiny") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": found}))
    with pytest.raises(ValueError, match="no registered format reads it"):
        prepare(str(tmp_path), NVFP4())
    with pytest.raises(ValueError, match="also quantizes activations; use a weight-only checkpoint"):
        prepare(str(tmp_path), FP8())


def test_a_plugin_that_cannot_be_made_does_not_hide_the_advice(tmp_path, monkeypatch):
    class Broken(BF16):
        def __init__(self):
            raise RuntimeError("no driver")

    monkeypatch.setitem(FORMATS._classes, "a_broken_one", Broken)  # before all others
    write_checkpoint(tmp_path / "model", qwen2(), NVFP4())
    with pytest.raises(ValueError, match=r"set model\.quantization: nvfp4$"):
        prepare(str(tmp_path / "model"), Int4())


def test_what_is_no_model(tmp_path):
    with pytest.raises(ValueError, match=r"is a folder without config\.json"):
        resolve(str(tmp_path))
    with pytest.raises(ValueError, match=r"there is no folder 'qwen', and it is no hub name \(owner/name\)"):
        resolve("qwen")
    assert (resolve("tiny") / "model.safetensors").is_file()


def test_names_of_projections():
    assert projection("model.layers.3.mlp.up_proj.weight_scale") == ("model.layers.3.mlp.up_proj", "weight_scale")
    assert projection("model.layers.0.self_attn.q_proj.weight.absmax") == (
        "model.layers.0.self_attn.q_proj",
        "weight.absmax",
    )
    assert projection("model.layers.0.self_attn.q_proj") == ("model.layers.0.self_attn.q_proj", "")
    for other in (
        "",
        "lm_head.weight",
        "model.layers.0.input_layernorm.weight",
        "q_proj.weight",
        "model.layers.0.q_projs",
    ):
        assert projection(other) is None and not is_projection(other)
    assert is_projection("model.layers.0.mlp.down_proj") and not is_projection("model.layers.0.mlp.down_proj.weight")


def test_a_missing_tensor_is_named(tmp_path):
    write_checkpoint(tmp_path / "model", qwen2(), NVFP4())
    weights = Weights(tmp_path / "model")
    del weights._file["model.layers.1.mlp.up_proj.weight_scale"]
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight_scale"):
        stored_projection(weights, "model.layers.1.mlp.up_proj", NVFP4())


def test_checkpoint_of_llm_compressor(tmp_path):
    """It loads as it is, with the numbers that compressed-tensors reads; those of our own rounding are close."""
    pytest.importorskip("llmcompressor", reason="needs llm-compressor: pip install 'qerl-pl[quantize]'")
    from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    write_checkpoint(tmp_path / "model", llama(), BF16())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    oneshot(model=theirs, recipe=QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=["lm_head"]))
    theirs.save_pretrained(tmp_path / "theirs", save_compressed=True)
    assert prepare(str(tmp_path / "theirs"), NVFP4()) == tmp_path / "theirs"
    ours = prepare(str(tmp_path / "model"), NVFP4(), tmp_path / "cache")
    a, b = Weights(tmp_path / "theirs"), Weights(ours)
    names = projections(ours)
    assert projections(tmp_path / "theirs") == names
    for name in names:
        one, two = ({k: w[f"{name}.{k}"] for k in NVFP4().layout(1, 16)} for w in (a, b))
        # It takes the largest weight in BF16 arithmetic; ours is FP32, and so a little finer.
        torch.testing.assert_close(one["weight_global_scale"], two["weight_global_scale"], rtol=2**-7, atol=0)
        dense = [NVFP4().dequantize(p, torch.float32) for p in (one, two)]
        assert (dense[0] - dense[1]).norm() < 0.05 * dense[1].norm(), name
        codes = unpack_fp4_from_uint8(one["weight_packed"], *dense[0].shape, dtype=torch.float32)
        divisor, scheme = one["weight_global_scale"], preset_name_to_scheme("NVFP4A16", targets=["Linear"])
        expected = dequantize(codes, one["weight_scale"].float(), None, scheme.weights, torch.float32, divisor)
        assert torch.equal(dense[0], expected), name
    model = build_model(tmp_path / "theirs", NVFP4(), torch.float32)
    assert sum(isinstance(m, PackedLinear) for m in model.modules()) == 14
    assert model(torch.tensor([[5, 9, 31, 7]])).logits.isfinite().all()


def test_a_format_that_was_edited_is_rounded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the folder can be read by whoever may read other files of the user."""
    source = "from registry.quantization import NVFP4\n\nclass Mine(NVFP4):\n    pass  # {}\n"
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine_edited.py").write_text(source.format("first"))
    from mine_edited import Mine  # type: ignore[import-not-found]

    first = prepare("tiny", Mine(), tmp_path / "cache")
    assert prepare("tiny", Mine(), tmp_path / "cache") == first
    (tmp_path / "mine_edited.py").write_text(source.format("second"))
    assert prepare("tiny", Mine(), tmp_path / "cache") != first

    usual = (tmp_path / "mine_edited.py").stat().st_mode & 0o777
    assert all(file.stat().st_mode & 0o777 == usual for file in first.glob("*.safetensors"))
    (tmp_path / "usual").mkdir()
    random = prepare("random:tiny-test", NVFP4(), tmp_path / "cache")
    assert first.stat().st_mode == random.stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_file_that_was_cut_off(tmp_path: Path) -> None:
    shutil.copytree(resolve("tiny"), tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"cut/model.safetensors cannot be read .*; it may be incomplete"):
        prepare(str(tmp_path / "cut"), NVFP4(), tmp_path / "cache")


def transposed(dense: torch.Tensor) -> torch.Tensor:
    return dense.flatten().view(-1, len(dense))


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (transposed, r"has the shape \(192, 128\), not that of the weight, \(128, 192\)"),
        (torch.Tensor.double, r"is of torch\.float64, not of the dtype asked for, torch\.bfloat16"),
        (torch.Tensor.bfloat16, r"is of torch\.bfloat16, not of the dtype asked for, torch\.float32"),
        (lambda dense: dense / 0, "has infinite numbers or NaN"),
        (torch.zeros_like, r"has a relative error of 1; it must be below 1"),
        (lambda dense: -4 * dense, r"has a relative error of 5; it must be below 1"),
    ],
    ids=["shape", "always wide", "always narrow", "infinite", "zeros", "far"],
)
def test_a_format_that_does_not_give_back_what_it_took(broken, expected, tmp_path):
    """Found in the first projection, before anything is left in the cache. BF16 is stored without rounding."""

    class Broken(BF16):
        config = property(lambda self: {"quant_method": "mine"})

        def dequantize(self, stored, dtype):
            return broken(stored["weight"].to(dtype))

    write_checkpoint(tmp_path / "model", qwen2(), BF16())
    with pytest.raises(ValueError, match=f"what Broken.dequantize makes of model.layers.0.*{expected}"):
        prepare(str(tmp_path / "model"), Broken(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("module", ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"])
def test_a_weight_that_is_not_finite_is_not_blamed_on_the_format(module, tmp_path):
    write_checkpoint(tmp_path / "model", qwen2(), BF16())
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{module}.weight"][3, 5] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"/model: {module}\.weight has infinite numbers or NaN; copy or download"):
        prepare(str(tmp_path / "model"), NVFP4(), tmp_path / "cache")


def test_a_format_that_computes_on_the_cpu():
    """For a weight that is elsewhere: here one without numbers, which refuses to meet those of the CPU."""

    class Mine(BF16):
        def dequantize(self, stored, dtype):
            return torch.ones(4, 8, dtype=dtype)

    weight = torch.ones(4, 8, device="meta")
    with pytest.raises(RuntimeError, match="meta tensors"):  # asked for a number, not for tensors on two devices
        check_round_trip("q_proj", weight, {}, Mine())
