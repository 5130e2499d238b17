"""What is computed otherwise on a GPU than on a CPU: kernels, attention, compiled operations. Twins: test_marlin.py,
test_layers.py, test_logprobs.py, test_packed.py, test_decoding.py, test_decode_linear.py.
"""

import pytest
import torch
from torch import Tensor

from qerl_pl import decoding, fused
from qerl_pl.decode_linear import decode_linear
from qerl_pl.layers import Packing, attention
from qerl_pl.logprobs import token_logprobs
from qerl_pl.packed import PackedLinear, frozen_linear
from registry.quantization import NVFP4
from tests.test_marlin import pack

pytestmark = pytest.mark.gpu


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double().cpu() - exact.double().cpu()).norm() / exact.double().norm().cpu())


def test_nvfp4_from_the_checkpoints_layout_is_exact() -> None:
    weights = [torch.randn(64, 96) * 0.05, torch.randn(1000, 4096) * 0.02, torch.randn(7, 16)]
    weights[0][:8] *= 1e-4  # scales that underflow
    for weight in weights:
        stored = NVFP4().quantize([weight])[0]
        on_gpu = {name: tensor.cuda() for name, tensor in stored.items()}
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(NVFP4().dequantize(on_gpu, dtype).cpu(), NVFP4().dequantize(stored, dtype))


def test_attention_and_its_gradients() -> None:
    lengths = torch.tensor([300, 17, 511, 1])
    shapes = [(int(lengths.sum()), heads, 128) for heads in (28, 4, 4)]
    exact = [torch.randn(s, generator=torch.Generator().manual_seed(0)).bfloat16().float() for s in shapes]
    inputs = [x.cuda().bfloat16().requires_grad_() for x in exact]
    exact = [x.requires_grad_() for x in exact]
    weight = torch.randn(shapes[0], generator=torch.Generator().manual_seed(1)).bfloat16()
    ours = attention(*inputs, Packing.of(lengths.cuda()), 0.1)
    theirs = attention(*exact, Packing.of(lengths), 0.1)
    assert error(ours, theirs) < 5e-3
    got = torch.autograd.grad((ours * weight.cuda()).sum(), inputs)
    want = torch.autograd.grad((theirs * weight.float()).sum(), exact)
    assert max(error(a, b) for a, b in zip(got, want, strict=True)) < 1e-2


def test_compiled_operations() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y, z = (torch.randn(50, 256, generator=generator).bfloat16() for _ in range(3))
    weight = torch.rand(256, generator=generator)
    heads = torch.randn(50, 6, 64, generator=generator).bfloat16()
    cos, sin = (torch.randn(50, 64, generator=generator).bfloat16() for _ in range(2))
    logits = 5 * torch.randn(50, 1000, generator=generator)
    logits[:, 990:] = -torch.inf
    targets = torch.randint(990, (50,), generator=generator)
    for name, arguments in (
        ("rms_norm", (x, weight, 1e-6)),
        ("swiglu", (x, y)),
        ("swiglu_backward", (z, x, y)),
        ("rotate", (heads, cos, sin)),
        ("token_statistics", (logits, targets, torch.float32)),
    ):
        function = getattr(fused, name)
        on_gpu = function(*(a.cuda() if isinstance(a, Tensor) else a for a in arguments))
        exact = function.__wrapped__(*map(in_float64, arguments))
        pairs = zip(*(v if isinstance(v, tuple) else (v,) for v in (on_gpu, exact)), strict=True)
        assert all(error(ours, theirs) < 4e-3 for ours, theirs in pairs if theirs is not None), name


def in_float64(value: object) -> object:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def test_logprobs_and_their_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = (
        torch.randn(300, 512, generator=generator).bfloat16(),
        torch.randn(5000, 512, generator=generator).bfloat16(),
    )
    targets, weight = torch.randint(5000, (300,), generator=generator), torch.randn(300, generator=generator)
    exact = hidden.double().requires_grad_()
    logits = (exact @ head.double().T / 7).log_softmax(-1)
    want = logits.gather(-1, targets[:, None])[:, 0]
    (want * weight).sum().backward()
    ours = hidden.cuda().requires_grad_()
    logprobs, entropy = token_logprobs(ours, head.cuda(), targets.cuda(), 7.0, chunk=128)
    (logprobs * weight.cuda()).sum().backward()
    assert (logprobs.cpu() - want).abs().max() < 1e-4  # products of BF16 numbers are exact in FP32
    assert (entropy.cpu() + (logits.exp() * logits).sum(-1)).abs().max() < 1e-4
    assert error(ours.grad, exact.grad) < 1e-2


def test_linear_with_adapter() -> None:
    generator = torch.Generator().manual_seed(0)
    stored = NVFP4().quantize([torch.randn(384, 256, generator=generator) * 0.05])[0]
    x, up = (torch.randn(70, 256, generator=generator).bfloat16() for _ in range(2))
    a, b, bias = (torch.randn(s, generator=generator) * 0.1 for s in ((8, 256), (384, 8), (384,)))
    weight = torch.randn(70, 384, generator=generator).bfloat16()

    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        inputs = [t.to(device, dtype).requires_grad_() for t in (x, up)]
        adapter = [t.to(device).requires_grad_() for t in (a, b)]
        layer = PackedLinear(NVFP4(), {k: t.to(device) for k, t in stored.items()}, bias.to(device))
        y = frozen_linear(inputs[0], layer, inputs[1], *adapter, 2.0)
        return [y, *torch.autograd.grad((y * weight.to(device, dtype)).sum(), [*inputs, *adapter])]

    for ours, exact in zip(run("cuda", torch.bfloat16), run("cpu", torch.float32), strict=True):
        assert error(ours, exact) < 1e-2
    assert run("cuda", torch.bfloat16)[3].dtype == torch.float32


@pytest.mark.parametrize("rows", [1, 8, 256, 4096])
def test_the_adapter_of_a_decoding_step(rows: int) -> None:
    """q, k, v of a 7B model and rank 32; y is rounded once more than the reference."""
    generator = torch.Generator().manual_seed(0)
    widths, rank, inputs = (3584, 512, 512), 32, 3584
    x, a, b, y = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((rows, inputs), (3 * rank, inputs), (sum(widths), rank), (rows, sum(widths)))
    )
    want = y.double()
    for part, low, high in zip(want.split(widths, 1), a.split(rank), b.split(widths), strict=True):
        part += x.double() @ low.double().T @ high.double().T
    torch.cuda.synchronize()
    z = decoding.shrink(x.cuda(), a.cuda(), torch.cuda.Stream())
    torch.cuda.synchronize()
    assert error(decoding.expand(y.cuda(), z, b.cuda(), widths), want) < 4e-3


@pytest.mark.parametrize("rows", [1, 8, 256, 4096])
def test_swiglu_with_the_adapter_of_gate_and_up(rows: int) -> None:
    """Gate and up are rounded to BF16 before the product, and the product once more."""
    generator = torch.Generator().manual_seed(0)
    width, rank, inputs = 1152, 32, 512
    x, a, b, y = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((rows, inputs), (2 * rank, inputs), (2 * width, rank), (rows, 2 * width))
    )
    a = a / 16
    gate, up = (
        (half + x.double() @ low.double().T @ high.double().T).bfloat16().double()
        for half, low, high in zip(y.double().chunk(2, 1), a.split(rank), b.split(width), strict=True)
    )
    got = decoding.swiglu(y.cuda(), decoding.shrink(x.cuda(), a.cuda()), b.cuda())
    assert error(got, gate * gate.sigmoid() * up) < 6e-3


@pytest.mark.parametrize(("tokens", "columns"), [(1, 96), (5, 24), (8, 32), (3, 64), (8, 72), (2, 200)])
def test_a_layer_of_few_tokens(tokens: int, columns: int) -> None:
    """Sums of BF16 products in FP32, with a bias and A x of the adapter, against float64."""
    outputs, inputs = 512, 1184
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)) * 0.05
    stored = NVFP4().quantize([weight])
    packed, scales, scale = pack(stored, "humming")
    x, a, bias = (torch.randn(n, inputs).bfloat16() for n in (tokens, columns, 1))
    bias = bias[0, :outputs].contiguous()
    arrived = torch.zeros(1, dtype=torch.int32, device="cuda")
    for _ in range(2):
        y, z = decode_linear(*(t.cuda() for t in (x, packed, scales)), scale, bias.cuda(), a.cuda(), arrived)
    want = x.double() @ NVFP4().dequantize(stored[0], torch.float32).double().T + bias.double()
    assert error(y.sum(0), want) < 1e-5
    assert error(z, x.double() @ a.double().T) < 1e-5


def test_kernels_that_begin_early_wait_for_what_they_read() -> None:
    """In a CUDA graph, where the next launch begins while a kernel ends or runs, as one after the other."""
    size, rank, generator = 512, 32, torch.Generator().manual_seed(0)
    packed, scales, scale = pack(
        NVFP4().quantize([torch.randn(size, size, generator=generator) / size**0.5]), "humming"
    )
    a, b = torch.randn(rank, size, generator=generator) / size**0.5, torch.randn(size, rank, generator=generator)
    on_gpu = [packed.cuda(), scales.cuda(), a.bfloat16().cuda(), b.bfloat16().cuda()]
    arrived = torch.zeros(1, dtype=torch.int32, device="cuda")
    norm = 1 + 0.1 * torch.randn(size, generator=generator).cuda()

    def layers(x: Tensor, apart: bool) -> Tensor:
        def done() -> None:
            if apart:
                torch.cuda.synchronize()

        for _ in range(20):
            x = decoding.rms_norm(x, None, norm, 1e-6)
            done()
            y, z = decode_linear(x, on_gpu[0], on_gpu[1], scale, None, on_gpu[2], arrived)
            done()
            x = decoding.expand(y, z, on_gpu[3], (size,))
            done()
        return x

    x = torch.zeros(8, size, dtype=torch.bfloat16, device="cuda")
    layers(x, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers(x, False)
    for _ in range(20):
        x.copy_(torch.randn(8, size, generator=generator))
        graph.replay()
        together = out.clone()
        assert torch.equal(together, layers(x.clone(), True))
        assert together.isfinite().all()


def test_norm_of_a_decoding_step() -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(300, 3584, generator=generator).bfloat16() for _ in range(2))
    weight = 1 + 1e-3 * torch.randn(3584, generator=generator)
    total = x + residual
    on_gpu = residual.cuda()
    ours = decoding.rms_norm(x.cuda(), on_gpu, weight.cuda(), 1e-6)
    assert torch.equal(on_gpu.cpu(), total)
    want = total.double() / (total.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    torch.testing.assert_close(ours.double().cpu(), want, rtol=2**-8, atol=0)


@pytest.mark.parametrize("rows", [1, 8, 256, 4096])
def test_rotary_with_the_adapter_of_q_k_and_v(rows: int) -> None:
    """q, k, v of a 7B model, whose sums are rounded to BF16 before q and k are rotated, and once more after."""
    generator = torch.Generator().manual_seed(0)
    widths, rank, inputs, head = (3584, 512, 512), 32, 3584, 128
    x, a, b, y = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((rows, inputs), (3 * rank, inputs), (sum(widths), rank), (rows, sum(widths)))
    )
    a, positions = a / 64, torch.randint(100, (rows,), generator=generator)
    angles = torch.randn(100, head // 2, generator=generator)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).bfloat16()
    parts = []
    for part, low, high in zip(y.double().split(widths, 1), a.split(rank), b.split(widths), strict=True):
        value = (part + x.double() @ low.double().T @ high.double().T).bfloat16().double()
        parts.append(value.view(rows, -1, head))
    cos, sin = cos_sin[positions, None].double().chunk(2, -1)
    for i in range(2):
        low, high = parts[i].chunk(2, -1)
        parts[i] = torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
    out = y.cuda()
    z = decoding.shrink(x.cuda(), a.cuda())
    decoding.rotary(out, z, b.cuda(), widths, positions.cuda(), cos_sin.cuda(), out)
    assert error(out, torch.cat([part.flatten(1) for part in parts], 1)) < 6e-3
