"""BF16: the base as it is."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from registry.quantization.base import FORMATS, QuantFormat


@FORMATS.register("bf16")
class BF16(QuantFormat):
    """Unquantized weights, the baseline of the paper."""

    bits_per_weight = 16.0

    @property
    def config(self) -> dict[str, Any] | None:
        return None

    def layout(self, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"weight": ((out_features, in_features), torch.bfloat16)}

    def shape(self, stored: Mapping[str, Tensor]) -> tuple[int, int]:
        rows, columns = stored["weight"].shape
        return rows, columns

    def quantize(self, weights: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        return [{"weight": w.to(torch.bfloat16)} for w in weights]

    def dequantize(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return stored["weight"].to(dtype)

    def fill_random(
        self, key: str, tensor: Tensor, shape: tuple[int, int], std: float, generator: torch.Generator
    ) -> None:
        tensor.normal_(0, std, generator=generator)
