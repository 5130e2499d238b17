"""NVFP4 against compressed-tensors, which defines the checkpoint, and against numbers worked out by hand."""

import pytest
import torch

from registry.quantization import NVFP4
from registry.quantization.packing import E2M1, round_to_e2m1

compressed_tensors = pytest.importorskip(
    "compressed_tensors", reason="needs compressed-tensors: pip install llmcompressor"
)


def scheme():
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    found = preset_name_to_scheme("NVFP4A16", targets=["Linear"])
    assert isinstance(found, QuantizationScheme)
    return found


def weights(*rows, columns=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(r, columns, generator=generator) * 10 ** torch.randn(r, 1, generator=generator) for r in rows]


def test_by_hand():
    # One group: largest 12, so the divisor is 448 * 6 / 12 = 224 and the scale 12 / 6 * 224 = 448: a step of exactly 2.
    weight = torch.zeros(1, 16)
    weight[0, :9] = torch.tensor([12.0, -8.0, 6.0, 4.0, 3.0, -2.0, 1.0, 0.4, 2.5])
    stored = NVFP4().quantize([weight])[0]
    assert stored["weight_global_scale"].tolist() == [224.0]
    assert stored["weight_scale"].float().tolist() == [[448.0]]
    # In steps of 2: 6, -4, 3, 2, 1.5, -1, 0.5, 0.2 -> 0, 1.25 -> 1 (a tie goes to the even code)
    assert stored["weight_packed"][0, :5].tolist() == [
        0x7 | 0xE << 4,
        0x5 | 0x4 << 4,
        0x3 | 0xA << 4,
        0x1 | 0x0 << 4,
        0x2,
    ]
    back = NVFP4().dequantize(stored, torch.float32)
    assert back[0, :9].tolist() == [12.0, -8.0, 6.0, 4.0, 3.0, -2.0, 1.0, 0.0, 2.0]


def test_rounding_is_nearest_with_ties_to_even():
    grid = torch.tensor(E2M1)
    midpoints = (grid[1:] + grid[:-1]) / 2
    codes = round_to_e2m1(torch.cat([midpoints, -midpoints]))
    expected = torch.tensor([0, 2, 2, 4, 4, 6, 6])
    assert codes.tolist() == [*expected.tolist(), *(expected + 8).tolist()]
    x = torch.linspace(-7, 7, 4001, dtype=torch.float64)
    nearest = (x.abs().unsqueeze(-1) - grid.double()).abs().min(-1).values
    values = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64)[round_to_e2m1(x).long()]
    torch.testing.assert_close((values - x).abs(), nearest, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantization_is_bit_exact(dtype):
    from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    for stored in NVFP4().quantize(weights(48, 16)):
        rows, half = stored["weight_packed"].shape
        codes = unpack_fp4_from_uint8(stored["weight_packed"], rows, 2 * half, dtype=torch.float32)
        reference = dequantize(
            x_q=codes, scale=stored["weight_scale"].float(), args=scheme().weights,
            global_scale=stored["weight_global_scale"], dtype=dtype,
        )  # fmt: skip
        assert torch.equal(NVFP4().dequantize(stored, dtype), reference.to(dtype))


def test_quantization_is_that_of_compressed_tensors():
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    weight = weights(32, seed=3)[0]
    groups = weight.reshape(32, 4, 16)
    divisor = generate_gparam(weight.min(), weight.max())
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme().weights, divisor)
    reference = NVFP4PackedCompressor.compress(
        {"weight": weight, "weight_scale": scale, "weight_global_scale": divisor}, scheme()
    )
    stored = NVFP4().quantize([weight])[0]
    assert torch.equal(stored["weight_global_scale"], divisor)
    assert torch.equal(stored["weight_scale"].view(torch.uint8), reference["weight_scale"].view(torch.uint8))
    ours, theirs = NVFP4().dequantize(stored, torch.float32), NVFP4().dequantize(dict(reference), torch.float32)
    assert torch.equal(ours, theirs)  # codes of −0 and +0 may differ


def test_fused_weights_share_the_global_scale():
    q, k, v = weights(64, 32, 32)
    stored = NVFP4().quantize([q, k, v])
    largest = max(w.abs().max() for w in (q, k, v))
    assert {s["weight_global_scale"].item() for s in stored} == {(448 * 6 / largest).item()}


def test_zero_weight_and_tiny_groups_stay_finite():
    zero = NVFP4().quantize([torch.zeros(4, 32)])[0]
    assert torch.equal(NVFP4().dequantize(zero, torch.float32), torch.zeros(4, 32))
    weight = torch.full((1, 32), 1e-12)
    weight[0, 0] = 1.0
    back = NVFP4().dequantize(NVFP4().quantize([weight])[0], torch.float32)
    assert back.isfinite().all() and back[0, 16:].abs().max() <= 1e-6


def test_a_bad_shape_is_refused():
    with pytest.raises(ValueError, match=r"q_proj: input dimension 40 is not a multiple of 16"):
        NVFP4().check("model.layers.0.self_attn.q_proj", 40)
