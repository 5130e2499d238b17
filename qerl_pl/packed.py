"""Frozen linear layers that keep their weight packed, with an optional low-rank adapter in the same operation."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from qerl_pl.fused import swiglu, swiglu_backward
from registry.quantization import QuantFormat

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Weight(Protocol):
    """A frozen weight [out, in] that belongs to somebody else, for example to the engine."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""

    @property
    def scale(self) -> float:
        """The factor that ``dense`` leaves out."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight without its factor ``scale``; valid until the next call."""


_thread = threading.local()  # backward runs in threads of its own


@contextmanager
def recomputation() -> Iterator[None]:
    """While activations are computed again for backward: what only makes the output of a block is left out."""
    _thread.recomputing = True
    try:
        yield
    finally:
        _thread.recomputing = False


class _Matmul(torch.autograd.Function):
    """y = x Ŵᵀ + s · x Aᵀ Bᵀ (paper Eq. 2), where x may be silu(gate) · up.

    Ŵ is made dense in forward and again in backward, and so is the product silu(gate) · up: nothing dense is saved. A
    and B stay FP32 and are rounded to the dtype of the arithmetic; their gradients are FP32. With ``up`` it is the last
    layer of a block, whose output backward does not need.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor | None, a: Tensor | None, b: Tensor | None, layer: "FrozenLinear", s: float
    ) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        if up is not None and getattr(_thread, "recomputing", False):
            y = x.new_empty(x.numel() // x.shape[-1], layer.out_features, dtype=dtype)  # nobody reads it
        else:
            with torch.autocast(device, enabled=False):
                rows = _input(x, up, dtype)
                adapter = None if a is None or b is None else s * (rows @ a.to(dtype).T) @ b.to(dtype).T
                y = _times(rows, layer.dense(dtype).T, layer.scale, adapter)
                if layer.bias is not None:
                    y += layer.bias.to(dtype)
        ctx.layer, ctx.s, ctx.dtype, ctx.x_dtype, ctx.shape = layer, s, dtype, x.dtype, x.shape
        ctx.save_for_backward(*((x, up) if a is not None or up is not None else (None, None)), a, b)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, up, a, b = ctx.saved_tensors
        with torch.autocast(grads[0].device.type, enabled=False):
            dy = grads[0].reshape(-1, grads[0].shape[-1]).to(ctx.dtype)
            dx = da = db = dup = None
            if a is not None:
                rows, low = _input(x, up, ctx.dtype), a.to(ctx.dtype)
                dz = ctx.s * (dy @ b.to(ctx.dtype))  # [N, rank]
                da, db = _times_fp32(dz.T, rows), _times_fp32(dy.T, ctx.s * (rows @ low.T))
                del rows
            if ctx.needs_input_grad[0]:
                dx = _times(dy, ctx.layer.dense(ctx.dtype), ctx.layer.scale, None if a is None else dz @ low)
                if up is not None:
                    dx, dup = swiglu_backward(dx, x.reshape(dx.shape), up.reshape(dx.shape))
                    dup = dup.view(ctx.shape)
                dx = dx.view(ctx.shape).to(ctx.x_dtype)
        return dx, dup, da, db, None, None


def _input(x: Tensor, up: Tensor | None, dtype: torch.dtype) -> Tensor:  # [..., in] -> [N, in]
    rows = x.reshape(-1, x.shape[-1])
    return (rows if up is None else swiglu(rows, up.reshape(rows.shape))).to(dtype)


def _times(x: Tensor, w: Tensor, scale: float, addend: Tensor | None) -> Tensor:
    """scale · x w + addend, the factor applied to the FP32 sum; written over the addend.

    The large product comes last, because it hides the reading of the addend behind its arithmetic.
    """
    if addend is not None:
        return addend.addmm_(x, w, alpha=scale)
    return x @ w if scale == 1 else torch.addmm(x.new_empty(()), x, w, beta=0, alpha=scale)


def _times_fp32(x: Tensor, w: Tensor) -> Tensor:
    """x w in FP32, without copies of BF16 operands where the device can."""
    return torch.mm(x, w, out_dtype=torch.float32) if x.is_cuda and x.dtype != torch.float32 else x.float() @ w.float()


def frozen_linear(
    x: Tensor, layer: "FrozenLinear", up: Tensor | None = None, a: Tensor | None = None, b: Tensor | None = None,
    scaling: float = 1.0,
) -> Tensor:  # fmt: skip
    """x [..., in] -> [..., out]; with ``up`` the input is silu(x) · up; ``a`` [rank, in], ``b`` [out, rank]."""
    y: Tensor = _Matmul.apply(x, up, a, b, layer, scaling)
    return y


class FrozenLinear(nn.Linear):
    """``nn.Linear`` without a trainable weight. Its weight is ``scale`` times what ``dense`` gives."""

    scale = 1.0

    def __init__(self, shape: tuple[int, int], bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = shape
        self.register_buffer("bias", bias, persistent=False)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[out, in] without the factor ``scale``; valid until another layer is asked."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dense weight in FP32, computed at each access; PEFT asks for its device and dtype."""
        return self.dense(torch.float32) * self.scale

    def forward(self, x: Tensor, up: Tensor | None = None) -> Tensor:
        return frozen_linear(x, self, up)


class PackedLinear(FrozenLinear):
    """A layer over the stored tensors of a :class:`QuantFormat`, its own copy.

    Stored tensors are kept as integers of the same bits, so that no precision setting (``bf16-true``, ``.half()``)
    can cast a scale. They are not part of the state dict: a checkpoint never holds the base.
    """

    def __init__(self, quantization: QuantFormat, stored: Mapping[str, Tensor], bias: Tensor | None = None) -> None:
        rows, columns = quantization.shape(stored)
        super().__init__((int(rows), int(columns)), bias)
        self.quantization = quantization
        self._dtypes: dict[str, torch.dtype] = {}
        self._described_by = {name: stored[name].cpu() for name in quantization.described_by}
        for name, tensor in stored.items():
            if name in self._described_by:
                continue
            self._dtypes[name] = tensor.dtype
            self.register_buffer(_buffer(name), tensor.contiguous().view(_BITS[tensor.itemsize]), persistent=False)

    def stored(self) -> dict[str, Tensor]:
        """The stored tensors, as in the checkpoint."""
        packed = {name: getattr(self, _buffer(name)).view(dtype) for name, dtype in self._dtypes.items()}
        return packed | self._described_by

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.quantization.dequantize(self.stored(), dtype)

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, {type(self.quantization).__name__}, bias={self.bias is not None}"
        )


def _buffer(name: str) -> str:
    return "bits_" + name.replace(".", "_")


class SharedLinear(FrozenLinear):
    """A layer over a weight of the engine's; it holds no copy, and nothing here moves or casts it."""

    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        super().__init__(weight.shape, bias)
        self.shared, self.scale = weight, weight.scale

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.shared.dense(dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, shared with the engine, bias={self.bias is not None}"


class DenseWeight:
    """An unquantized weight [out, in] of the engine's."""

    scale = 1.0

    def __init__(self, weight: Tensor) -> None:
        self.tensor = weight

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.tensor.shape
        return rows, columns

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.tensor.to(dtype)
