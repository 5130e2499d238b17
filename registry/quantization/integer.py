"""Integer weights: 4 bits in groups, or 8 bits (paper Eq. 1, symmetric; the compressed-tensors layout
``pack-quantized``).
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from registry.quantization.base import FORMATS, QuantFormat
from registry.quantization.packing import (
    compressed_tensors,
    largest,
    mean_square,
    nibbles,
    pack_nibbles,
    scaled,
    steps,
)


class Integer(QuantFormat):
    """Ŵ = s · q with q = −2^(b−1) ... 2^(b−1) − 1 and s = max |W| / (2^b − 1) · 2 in BF16, along the input.

    Codes are stored as q + 2^(b−1), first code lowest in words of 32 bits.
    """

    bits: ClassVar[int]
    described_by = frozenset(["weight_shape"])

    def __init__(self, group_size: int | None) -> None:
        if group_size is not None and (group_size < 1 or group_size % (32 // self.bits)):
            raise ValueError(
                f"quantization.group_size: {group_size} must be a positive multiple of {32 // self.bits}, the codes of "
                "a word; give 32, 64 or 128, for which engines have kernels, or null: one scale for each output"
            )
        self.by_row = group_size is None
        self.group_size = group_size or 32 // self.bits
        self.bits_per_weight = self.bits + (0 if self.by_row else 16 / self.group_size)

    @property
    def config(self) -> dict[str, Any] | None:
        scales = {"strategy": "channel"} if self.by_row else {"strategy": "group", "group_size": self.group_size}
        return compressed_tensors("pack-quantized", num_bits=self.bits, type="int", **scales)

    def _groups(self, in_features: int) -> int:
        return 1 if self.by_row else in_features // self.group_size

    def layout(self, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            "weight_packed": ((out_features, in_features * self.bits // 32), torch.int32),
            "weight_scale": ((out_features, self._groups(in_features)), torch.bfloat16),
            "weight_shape": ((2,), torch.int64),
        }

    def shape(self, stored: Mapping[str, Tensor]) -> tuple[int, int]:
        rows, words = stored["weight_packed"].shape
        return rows, words * 32 // self.bits

    def quantize(self, weights: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        return [self._quantize(w) for w in weights]

    def _quantize(self, weight: Tensor) -> dict[str, Tensor]:
        half = 1 << self.bits - 1
        scale = (largest(weight, self._groups(weight.shape[1])) / (half - 0.5)).bfloat16()
        codes = (steps(weight, scale).round().clamp(-half, half - 1) + half).to(torch.uint8)
        shape = torch.tensor(weight.shape, device=weight.device)
        return {"weight_packed": self._pack(codes).view(torch.int32), "weight_scale": scale, "weight_shape": shape}

    def dequantize(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        packed = stored["weight_packed"].view(torch.uint8)
        columns = packed.shape[1] * 8 // self.bits
        return scaled(lambda rows: self._unpack(packed[rows]), stored["weight_scale"].float(), columns, dtype)

    def fill_random(
        self, key: str, tensor: Tensor, shape: tuple[int, int], std: float, generator: torch.Generator
    ) -> None:
        """All codes equally often; scales of 0.5 to 1.5 times their mean."""
        if key == "weight_packed":
            tensor.random_(-(1 << 31), 1 << 31, generator=generator)
        elif key == "weight_shape":
            tensor.copy_(torch.tensor(shape))
        else:
            half = 1 << self.bits - 1
            square = mean_square(range(-half, half)) * 13 / 12  # 1 + the variance of the scales
            tensor.uniform_(0.5, 1.5, generator=generator).mul_(std / square**0.5)

    @abstractmethod
    def _pack(self, codes: Tensor) -> Tensor:
        """Codes uint8 [out, in] -> bytes [out, in · bits / 8]."""

    @abstractmethod
    def _unpack(self, packed: Tensor) -> Tensor:
        """Bytes -> q in FP32 [out, in]."""


@FORMATS.register("int4")
class Int4(Integer):
    """4 bits (W4A16).

    Args:
        group_size: weights along the input that share a scale; null: all that belong to one output.
    """

    bits = 4

    def __init__(self, group_size: int | None = 128) -> None:
        super().__init__(group_size)

    def _pack(self, codes: Tensor) -> Tensor:
        return pack_nibbles(codes)

    def _unpack(self, packed: Tensor) -> Tensor:
        return nibbles(packed, tuple(float(q) for q in range(-8, 8)))


@FORMATS.register("int8")
class Int8(Integer):
    """8 bits (W8A16).

    Args:
        group_size: weights along the input that share a scale; null: all that belong to one output.
    """

    bits = 8

    def __init__(self, group_size: int | None = None) -> None:
        super().__init__(group_size)

    def _pack(self, codes: Tensor) -> Tensor:
        return codes

    def _unpack(self, packed: Tensor) -> Tensor:
        return packed.float() - 128
