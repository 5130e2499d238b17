"""The packed linear layer against an ordinary one over the same dequantized weight."""

import gc

import pytest
import torch
from torch import nn

from qerl_pl.packed import PackedLinear
from registry.quantization import BF16, FP8, MXFP4, NF4, NVFP4, Int4, Int8


def pair(format_, out=96, inner=64, dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    stored = format_.quantize([torch.randn(out, inner)])[0]
    b = torch.randn(out) if bias else None
    packed = PackedLinear(format_, stored, b)
    dense = nn.Linear(inner, out, bias=bias).to(dtype)
    with torch.no_grad():
        dense.weight.copy_(format_.dequantize(stored, dtype))
        if bias:
            dense.bias.copy_(b)
    return packed, dense


@pytest.mark.parametrize("format_", [NVFP4(), BF16(), MXFP4(), NF4(), Int4(32), Int8(), FP8()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_forward_and_gradient_are_those_of_a_linear(format_, dtype):
    packed, dense = pair(format_, dtype=dtype)
    x = torch.randn(3, 5, 64, dtype=dtype, requires_grad=True)
    grad = torch.randn(3, 5, 96, dtype=dtype)
    (ours,) = torch.autograd.grad(packed(x), x, grad)
    (theirs,) = torch.autograd.grad(dense(x), x, grad)
    rounding = {"atol": 0.05, "rtol": 0.02} if dtype == torch.bfloat16 else {}  # the bias is added after rounding
    torch.testing.assert_close(packed(x), dense(x), **rounding)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("format_", [NF4(), Int4(32)])
def test_what_python_reads_stays_on_the_cpu(format_):
    packed, _ = pair(format_)
    devices = {name: tensor.device.type for name, tensor in packed.to("meta").stored().items()}
    assert devices.keys() == format_.layout(96, 64).keys()
    assert {name for name, where in devices.items() if where == "cpu"} == format_.described_by != set()


def test_gradient_by_finite_differences():
    packed, _ = pair(NVFP4(), out=6, inner=16)
    x = torch.randn(2, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(packed, (x,))


def test_backward_saves_no_dense_weight():
    def saved_by(layer):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
            y = layer(torch.randn(2, 512, requires_grad=True) * 1.0)
        return saved, y

    packed, dense = pair(NVFP4(), out=512, inner=512, bias=False)
    assert 512 * 512 in saved_by(dense)[0]
    del dense
    saved, y = saved_by(packed)
    assert 512 * 512 not in saved
    gc.collect()  # nor does anything else keep a dense weight alive between forward and backward
    assert not [
        o for o in gc.get_objects() if isinstance(o, torch.Tensor) and o.is_floating_point() and o.numel() == 512 * 512
    ]
    y.sum().backward()


@pytest.mark.parametrize(
    "cast", [lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.double(), lambda m: m.to(torch.bfloat16)]
)
def test_no_cast_reaches_the_scales(cast):
    packed, _ = pair(NVFP4())
    before = {k: t.clone() for k, t in packed.stored().items()}
    after = cast(packed).stored()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-true", "64-true"])
def test_no_lightning_precision_reaches_the_scales(precision):
    from lightning import Trainer

    packed, _ = pair(NVFP4())
    before = {k: t.view(torch.uint8).clone() for k, t in packed.stored().items()}
    plugin = Trainer(accelerator="cpu", precision=precision, logger=False, enable_progress_bar=False).precision_plugin
    converted = plugin.convert_module(nn.Sequential(packed))[0]
    with plugin.forward_context():
        x = torch.randn(2, 64, requires_grad=True)
        converted(x).float().sum().backward()
    for name, tensor in before.items():
        assert torch.equal(converted.stored()[name].view(torch.uint8), tensor)


def test_autocast_computes_in_its_dtype():
    packed, dense = pair(NVFP4())
    x = torch.randn(4, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = packed(x), dense(x)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.02)
    ours.float().sum().backward()
    assert x.grad.dtype == torch.float32


def test_nothing_of_the_base_is_in_the_state_dict():
    packed, _ = pair(NVFP4())
    assert not packed.state_dict() and not list(packed.parameters())
