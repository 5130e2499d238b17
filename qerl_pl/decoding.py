"""Kernels of a decoding step (Triton): what one adapter adds to a linear layer, with what follows it, and RMSNorm.

A step of few tokens is bound by launches and by the bytes of weights, so what nothing runs beside is one kernel that
reads nothing twice.
"""

from contextlib import nullcontext
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 256  # that keep a large GPU busy
COLUMNS = 128  # of a tile of inputs
ROWS = 32  # tokens of a tile, at most


@triton.jit  # type: ignore[untyped-decorator]
def _shrink(x, a, z, rows, inputs, stride, outputs, chunk, ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr):  # type: ignore[no-untyped-def]
    """One share of the inputs: z [shares, rows, outputs] = x [rows, inputs] a [outputs, inputs]ᵀ."""
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    r = tl.program_id(1) * OUT + tl.arange(0, OUT)
    begin = tl.program_id(2) * chunk
    total = tl.full([ROWS, OUT], 0.0, tl.float32)
    for first in range(begin, tl.minimum(begin + chunk, inputs), IN):
        k = first + tl.arange(0, IN)
        inside = k < tl.minimum(begin + chunk, inputs)
        left = tl.load(x + m[:, None] * stride + k[None, :], mask=(m < rows)[:, None] & inside[None, :], other=0.0)
        right = tl.load(a + r[:, None] * inputs + k[None, :], mask=(r < outputs)[:, None] & inside[None, :], other=0.0)
        total += tl.dot(left, tl.trans(right))
    at = (tl.program_id(2) * rows + m[:, None]) * outputs + r[None, :]
    tl.store(z + at, total, mask=(m < rows)[:, None] & (r < outputs)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _plus(a, b):  # type: ignore[no-untyped-def]
    return a + b


@triton.jit  # type: ignore[untyped-decorator]
def _await(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Waits for what the kernels before have written. What is read before this, no kernel of a step writes; and the
    kernel after may begin while this one runs, with what it too reads before.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def _sum(y, at, inside, share, SUMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of SUMS tensors, ``share`` numbers behind one another."""
    total = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(1, SUMS):
        total += tl.load(y + at + i * share, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _matrix(b, n, begin, width, rank, RANK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows n and RANK columns of b [width, rank]."""
    r = begin + tl.arange(0, RANK)
    return tl.load(b + n[:, None] * rank + r[None, :], mask=(n < width)[:, None] & (r < rank)[None, :], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _low_rank(  # type: ignore[no-untyped-def]
    total, right, z, b, m, n, rows, width, rank, columns, first, RANK: tl.constexpr,
):  # fmt: skip
    """total [ROWS, OUT] + z bᵀ: rows m and ``rank`` columns from ``first`` on of z [rows, columns], and rows n of b
    [width, rank], of which ``right`` holds the first columns.
    """
    for begin in range(0, rank, RANK):
        r = begin + tl.arange(0, RANK)
        at = m[:, None] * columns + first + r[None, :]
        low = tl.load(z + at, mask=(m < rows)[:, None] & (r < rank)[None, :], other=0.0)
        if begin > 0:
            right = _matrix(b, n, begin, width, rank, RANK)
        total += tl.dot(low.to(right.dtype), tl.trans(right))
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _expand(  # type: ignore[no-untyped-def]
    z, b, y, out, rows, width, rank, columns, second, third, SUMS: tl.constexpr, ROWS: tl.constexpr,
    OUT: tl.constexpr, RANK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [rows, width] = y [SUMS, rows, width], summed, + z bᵀ; the outputs from ``second`` and from ``third`` on take
    the second and third ``rank`` columns of z.
    """
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUT + tl.arange(0, OUT)
    part = (tl.program_id(1) * OUT >= second).to(tl.int32) + (tl.program_id(1) * OUT >= third).to(tl.int32)
    inside = (m < rows)[:, None] & (n < width)[None, :]
    at = m[:, None].to(tl.int64) * width + n[None, :]
    right = _matrix(b, n, 0, width, rank, RANK)
    _await(EARLY)
    total = _sum(y, at, inside, rows * width, SUMS)
    total = _low_rank(total, right, z, b, m, n, rows, width, rank, columns, part * rank, RANK)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu(  # type: ignore[no-untyped-def]
    z, b, y, out, rows, width, rank, columns, SUMS: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr,
    RANK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [rows, width] = silu(gate) · up; gate and up are y [SUMS, rows, 2 width], summed, + z bᵀ, rounded as if they
    were stored.
    """
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUT + tl.arange(0, OUT)
    inside = (m < rows)[:, None] & (n < width)[None, :]
    at = m[:, None].to(tl.int64) * (2 * width) + n[None, :]
    of_gate, of_up = _matrix(b, n, 0, width, rank, RANK), _matrix(b + width * rank, n, 0, width, rank, RANK)
    _await(EARLY)
    gate = _sum(y, at, inside, rows * 2 * width, SUMS)
    up = _sum(y, at + width, inside, rows * 2 * width, SUMS)
    gate = _low_rank(gate, of_gate, z, b, m, n, rows, width, rank, columns, 0, RANK)
    up = _low_rank(up, of_up, z, b + width * rank, m, n, rows, width, rank, columns, rank, RANK)
    gate = gate.to(out.dtype.element_ty).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + m[:, None].to(tl.int64) * width + n[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotary(  # type: ignore[no-untyped-def]
    z, b, y, out, positions, cos_sin, rows, width, rank, columns, second, third, SUMS: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, RANK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [rows, width] as of ``_expand``, rounded as if it were stored, and then rotated by ``cos_sin`` [., 2 HALF] of
    the rows' positions but for the third part; a program computes one head, 2 HALF wide.
    """
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first, half = tl.program_id(1) * 2 * HALF, tl.arange(0, HALF)
    n = first + half
    part = (first >= second).to(tl.int32) + (first >= third).to(tl.int32)
    inside = (m < rows)[:, None] & (n < width)[None, :]
    at = m[:, None].to(tl.int64) * width + n[None, :]
    angle = tl.load(positions + m, mask=m < rows, other=0)[:, None] * 2 * HALF + half[None, :]
    turned = inside & (n < third)[None, :]
    cos = tl.load(cos_sin + angle, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(cos_sin + angle + HALF, mask=turned, other=0.0).to(tl.float32)
    of_low, of_high = _matrix(b, n, 0, width, rank, RANK), _matrix(b, n + HALF, 0, width, rank, RANK)
    _await(EARLY)
    low = _sum(y, at, inside, rows * width, SUMS)
    high = _sum(y, at + HALF, inside, rows * width, SUMS)
    low = _low_rank(low, of_low, z, b, m, n, rows, width, rank, columns, part * rank, RANK)
    high = _low_rank(high, of_high, z, b, m, n + HALF, rows, width, rank, columns, part * rank, RANK)
    low = low.to(out.dtype.element_ty).to(tl.float32)
    high = high.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + at, (low * cos - high * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + HALF, (high * cos + low * sin).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    x, residual, weight, out, width, heads, outer, inner, eps, ADD: tl.constexpr, WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDE)
    inside = k < width
    scales = tl.load(weight + k, mask=inside, other=0.0)
    _await(EARLY)
    value = tl.load(x + row // heads * outer + row % heads * inner + k, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * width + k, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row * width + k, rounded, mask=inside)
        value = rounded.to(tl.float32)  # the trainer too norms the sum that goes on
    scale = tl.rsqrt(tl.reduce(value * value, 0, _plus) / width + eps)
    value = value * scale * scales
    tl.store(out + row * width + k, value.to(out.dtype.element_ty), mask=inside)


def shrink(x: Tensor, a: Tensor, stream: torch.cuda.Stream | None = None) -> Tensor:
    """x [N, in], a [outputs, in] -> z [N, outputs] in FP32: x aᵀ, summed up by shares of the inputs.

    Computed on ``stream`` if one is given, for which the caller must wait; the memory belongs to the current one.
    """
    (rows, inputs), outputs = x.shape, a.shape[0]
    m, r = _tile(rows, 64), _tile(outputs, 32)
    tiles = triton.cdiv(rows, m) * triton.cdiv(outputs, r)
    most = max(1, min(16, PROGRAMS // tiles, inputs // (2 * COLUMNS)))
    shares = 1 << (most.bit_length() - 1)
    chunk = triton.cdiv(triton.cdiv(inputs, shares), COLUMNS) * COLUMNS
    # One tensor, as what is returned must keep the shares from being reused before ``stream`` has got that far.
    several = int(shares > 1)
    z = torch.empty(several + shares, rows, outputs, dtype=torch.float32, device=x.device)
    total, parts = z[0], z[several:]
    grid = (triton.cdiv(rows, m), triton.cdiv(outputs, r), shares)
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        _shrink[grid](x, a, parts, rows, inputs, x.stride(0), outputs, chunk, ROWS=m, OUT=r, IN=COLUMNS)
        if several:  # here it is beside the layer; what adds z is not
            torch.sum(parts, 0, out=total)
    return total


def expand(y: Tensor, z: Tensor, b: Tensor, widths: tuple[int, ...]) -> Tensor:
    """y + z bᵀ [N, out] in the dtype of b. y [N, out] is overwritten; of y [shares, N, out] the sum is taken.

    z [N, parts · rank] is from :func:`shrink`, b [out, rank]; ``widths`` are the outputs of up to three parts.
    """
    rows, columns = z.shape
    width, rank = b.shape
    out = y if y.dim() == 2 else torch.empty(rows, width, dtype=b.dtype, device=y.device)
    m, tile = _tile(rows, ROWS), tile_of_outputs(widths)
    if y.dim() == 3:  # of few tokens
        tile = min(tile, 32)
    starts = [sum(widths[:i]) for i in range(1, len(widths))] + [width] * (3 - len(widths))
    grid = (triton.cdiv(rows, m), triton.cdiv(width, tile))
    _expand[grid](
        z, b, y, out, rows, width, rank, columns, *starts, SUMS=1 if y.dim() == 2 else len(y), ROWS=m,
        OUT=tile, RANK=_tile(rank, 64), **_launch(y.device),
    )  # fmt: skip
    return out


def swiglu(y: Tensor, z: Tensor, b: Tensor) -> Tensor:
    """silu(gate) · up [N, I] in the dtype of b, where gate and up are the halves of y + z bᵀ: y [N, 2 I] or [shares, N,
    2 I], z and b as in :func:`expand`.
    """
    rows, columns = z.shape
    width, rank = b.shape[0] // 2, b.shape[1]
    out = torch.empty(rows, width, dtype=b.dtype, device=y.device)
    m, (tile, warps) = _tile(rows, ROWS), (64, 4) if y.dim() == 2 else (128, 8)
    grid = (triton.cdiv(rows, m), triton.cdiv(width, tile))
    _swiglu[grid](
        z, b, y, out, rows, width, rank, columns, SUMS=1 if y.dim() == 2 else len(y), ROWS=m, OUT=tile,
        RANK=_tile(rank, 64), num_warps=warps, **_launch(y.device),
    )  # fmt: skip
    return out


def rotary(
    y: Tensor, z: Tensor, b: Tensor, widths: tuple[int, ...], positions: Tensor, cos_sin: Tensor, out: Tensor
) -> None:
    """``out`` [N, out] = q, k and v of ``widths`` as of :func:`expand`, with q and k rotated by their positions [N].

    ``cos_sin`` [positions, D] has the cosines of half a head of D outputs, and then the sines. ``out`` may be y.
    """
    rows, columns = z.shape
    width, rank, head = sum(widths), b.shape[1], cos_sin.shape[1]
    m = _tile(rows, ROWS)
    _rotary[(triton.cdiv(rows, m), width // head)](
        z, b, y, out, positions, cos_sin, rows, width, rank, columns, widths[0], widths[0] + widths[1],
        SUMS=1 if y.dim() == 2 else len(y), ROWS=m, HALF=head // 2, RANK=_tile(rank, 64),
        **_launch(y.device),
    )  # fmt: skip


def tile_of_outputs(widths: tuple[int, ...]) -> int:
    """The largest tile of outputs of which none lies in two parts; :func:`expand` needs at least 16."""
    return next(size for size in (128, 64, 32, 16, 8, 4, 2, 1) if all(width % size == 0 for width in widths[:-1]))


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., H] by FP32 weights [H], computed in FP32, in a new tensor; x may have strides between rows.

    With ``residual`` [N, H], x [N, H] is first added to it in place, and the sum is what is normed.
    """
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, heads = x.numel() // width, x.shape[-2] if x.dim() == 3 else 1
    inner = x.stride(-2) if x.dim() == 3 else 0
    wide = triton.next_power_of_2(width)
    _norm[(rows,)](
        x, residual, weight, out, width, heads, x.stride(0), inner, eps, ADD=residual is not None, WIDE=wide,
        num_warps=max(1, min(16, wide // 512)), **_launch(x.device),
    )  # fmt: skip
    return out


@cache
def _launch(device: torch.device) -> dict[str, bool]:
    """A launch may begin while the kernel before it runs, and waits before it reads what that one wrote: Hopper and
    later.
    """
    early = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"EARLY": early, "launch_pdl": True} if early else {"EARLY": False}


def _tile(size: int, largest: int) -> int:
    """A power of two from 16 (which matrix units need) to ``largest`` that covers ``size`` if it can."""
    return max(16, min(largest, triton.next_power_of_2(size)))
