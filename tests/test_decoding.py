"""Kernels of a decoding step, with Triton's interpreter instead of a GPU. Twin: gpu/test_kernels.py."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding, apply_rotary_pos_emb

from tests.test_marlin import interpreted

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture
def decoding() -> Iterator[ModuleType]:
    from qerl_pl import decoding

    yield from interpreted(decoding)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("rows", "inputs", "widths", "rank"),
    [
        (1, 64, (64,), 8),
        (3, 600, (128, 32, 32), 5),  # neither inputs nor rank fill a tile
        (70, 1024, (96, 96), 16),  # several tiles of rows, shares of inputs
        (2, 256, (160,), 100),  # a rank of several tiles
    ],
)
def test_the_adapter_by_kernels(
    decoding: ModuleType, rows: int, inputs: int, widths: tuple[int, ...], rank: int
) -> None:
    """Against float64; with FP32 matrices nothing is rounded on the way."""
    x, a = random(rows, inputs, seed=1), random(len(widths) * rank, inputs, seed=2)
    b, y = random(sum(widths), rank, seed=3), random(rows, sum(widths), seed=4)
    want = y.double()
    for part, low, high in zip(want.split(widths, 1), a.split(rank), b.split(widths), strict=True):
        part += x.double() @ low.double().T @ high.double().T
    z = decoding.shrink(x, a)
    torch.testing.assert_close(z.double(), x.double() @ a.double().T, rtol=1e-5, atol=1e-3)
    shares = torch.stack([y - 1, random(*y.shape, seed=5)])
    for given in (torch.cat([shares, (1 - shares[1])[None]]), y):  # in shares, and in place
        got = decoding.expand(given, z, b, widths)
        assert (got is y) == (given is y)
        assert ((got - want).norm() / want.norm()) < 1e-6


def test_tiles_of_outputs(decoding: ModuleType) -> None:
    """No tile lies in two parts; the last part may end anywhere."""
    assert decoding.tile_of_outputs((896, 128, 128)) == 128
    assert decoding.tile_of_outputs((192, 64, 64)) == 64
    assert decoding.tile_of_outputs((17,)) == 128
    assert decoding.tile_of_outputs((24, 8)) == 8


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def test_rms_norm(decoding: ModuleType) -> None:
    """The sum that goes on is rounded before it is normed; the norm of it is rounded once.

    In FP16: the interpreter cuts BF16 off instead of rounding it.
    """
    x, residual = random(5, 90, seed=1).half(), random(5, 90, seed=2).half()
    weight = 1 + 1e-3 * random(90, seed=3)
    exact = decoding.rms_norm(x.float(), None, weight, 1e-6)
    torch.testing.assert_close(exact.double(), norm(x.float(), weight, 1e-6), rtol=1e-5, atol=1e-6)

    total = x + residual
    y = decoding.rms_norm(x, residual, weight, 1e-6)
    assert y.dtype == torch.float16
    assert torch.equal(residual, total)
    torch.testing.assert_close(y.double(), norm(total, weight, 1e-6), rtol=2**-11, atol=0)


def test_rms_norm_of_heads_within_a_wider_row(decoding: ModuleType) -> None:
    """q of q, k, v, as Qwen3 norms it: rows have strides."""
    qkv = random(3, 7 * 16, seed=1)
    q = qkv[:, 16 : 16 * 5].view(3, 4, 16)
    assert not q.is_contiguous()
    weight = random(16, seed=2)
    torch.testing.assert_close(
        decoding.rms_norm(q, None, weight, 1e-6).double(), norm(q, weight, 1e-6), rtol=1e-5, atol=1e-6
    )


def test_swiglu_with_the_adapter_of_gate_and_up(decoding: ModuleType) -> None:
    """Against float64; in FP32 nothing is rounded on the way."""
    rows, width, rank, inputs = 5, 200, 12, 700
    x, a = random(rows, inputs, seed=1) / inputs**0.5, random(2 * rank, inputs, seed=2)
    b, y = random(2 * width, rank, seed=3), random(rows, 2 * width, seed=4)
    gate, up = (
        half + x.double() @ low.double().T @ high.double().T
        for half, low, high in zip(y.double().chunk(2, 1), a.split(rank), b.split(width), strict=True)
    )
    for given in (y, torch.stack([y - 1, torch.ones_like(y)])):
        got = decoding.swiglu(given, decoding.shrink(x, a), b)
        torch.testing.assert_close(got.double(), gate * gate.sigmoid() * up, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 40])
def test_rotary_with_the_adapter_of_q_k_and_v(decoding: ModuleType, rows: int) -> None:
    """Against Hugging Face's rotation in float64; v gets its adapter, no rotation, and nothing else is written."""
    head, widths, rank, inputs = 32, (4 * 32, 2 * 32, 2 * 32), 6, 96
    x, a = random(rows, inputs, seed=1), random(3 * rank, inputs, seed=2)
    b, y = random(sum(widths), rank, seed=3), random(rows, sum(widths), seed=4)
    positions = torch.randint(90, (rows,), generator=torch.Generator().manual_seed(5))
    rotary = Qwen2RotaryEmbedding(Qwen2Config(hidden_size=128, num_attention_heads=4, max_position_embeddings=90))
    cos, sin = (t[0].double() for t in rotary(torch.zeros(1, 1, 1), torch.arange(90)[None]))
    want = [
        (part + x.double() @ low.double().T @ high.double().T).view(1, rows, -1, head).transpose(1, 2)
        for part, low, high in zip(y.double().split(widths, 1), a.split(rank), b.split(widths), strict=True)
    ]
    want[:2] = apply_rotary_pos_emb(*want[:2], cos[positions][None], sin[positions][None])
    cos_sin = torch.cat([cos[:, : head // 2], sin[:, : head // 2]], 1).float()
    z = decoding.shrink(x, a)
    for given, out in ((y, y.clone()), (torch.stack([y - 1, torch.ones_like(y)]), torch.full_like(y, torch.nan))):
        decoding.rotary(out if given is y else given, z, b, widths, positions, cos_sin, out)
        for got, exact in zip(out.split(widths, 1), want, strict=True):
            exact = exact.transpose(1, 2).reshape(rows, -1)
            torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-4)
