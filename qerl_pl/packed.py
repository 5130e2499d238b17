"""A frozen linear layer that keeps its weight packed."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from registry.quantization import QuantFormat

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class _PackedMatmul(torch.autograd.Function):
    """y = x Ŵᵀ, with Ŵ dequantized in forward and again in backward: nothing dense is saved between the two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "PackedLinear") -> Tensor:  # x [..., in] -> [..., out]
        device = x.device.type
        ctx.layer = layer
        ctx.input_dtype = x.dtype
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            return linear(x.to(ctx.dtype), layer.dequantize(ctx.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        with torch.autocast(grads[0].device.type, enabled=False):
            return (grads[0].to(ctx.dtype) @ ctx.layer.dequantize(ctx.dtype)).to(ctx.input_dtype), None


class PackedLinear(nn.Linear):
    """``nn.Linear`` over the stored tensors of a :class:`QuantFormat`; it has no trainable weight.

    Stored tensors are kept as integers of the same bits, so that no precision setting (``bf16-true``, ``.half()``)
    can cast a scale. They are not part of the state dict: a checkpoint never holds the base.
    """

    def __init__(self, quantization: QuantFormat, stored: Mapping[str, Tensor], bias: Tensor | None = None) -> None:
        nn.Module.__init__(self)
        self.quantization = quantization
        self._dtypes: dict[str, torch.dtype] = {}
        for name, tensor in stored.items():
            self._dtypes[name] = tensor.dtype
            self.register_buffer(f"bits_{name}", tensor.contiguous().view(_BITS[tensor.itemsize]), persistent=False)
        self.out_features, self.in_features = (int(n) for n in quantization.shape(stored))
        self.register_buffer("bias", bias, persistent=False)

    def stored(self) -> dict[str, Tensor]:
        """The stored tensors, as in the checkpoint."""
        return {name: getattr(self, f"bits_{name}").view(dtype) for name, dtype in self._dtypes.items()}

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The dense weight [out, in]."""
        return self.quantization.dequantize(self.stored(), dtype)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dense weight in FP32, computed at each access; PEFT asks for its device and dtype."""
        return self.dequantize(torch.float32)

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        y: Tensor = _PackedMatmul.apply(x, self)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, {type(self.quantization).__name__}, bias={self.bias is not None}"
        )
