"""MXFP4: 4-bit floats with powers of two as scales (OCP Microscaling Formats v1.0; the compressed-tensors layout
``mxfp4-pack-quantized``).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from registry.quantization.base import FORMATS, QuantFormat
from registry.quantization.packing import (
    E2M1,
    E2M1_VALUES,
    compressed_tensors,
    largest,
    mean_square,
    nibbles,
    pack_nibbles,
    round_to_e2m1,
    scaled,
    steps,
)


@FORMATS.register("mxfp4")
class MXFP4(QuantFormat):
    """E2M1 weights and one E8M0 scale, a power of two, for 32 of them along the input."""

    group_size = 32
    bits_per_weight = 4.25

    @property
    def config(self) -> dict[str, Any] | None:
        scales = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        return compressed_tensors("mxfp4-pack-quantized", num_bits=4, type="float", **scales)

    def layout(self, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            "weight_packed": ((out_features, in_features // 2), torch.uint8),
            "weight_scale": ((out_features, in_features // 32), torch.uint8),
        }

    def shape(self, stored: Mapping[str, Tensor]) -> tuple[int, int]:
        rows, half = stored["weight_packed"].shape
        return rows, 2 * half

    def quantize(self, weights: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        return [self._quantize(w) for w in weights]

    def _quantize(self, weight: Tensor) -> dict[str, Tensor]:
        # The largest weight becomes 3.5 to 7, of which 6 is the largest code: its power of two (the exponent of an
        # FP32), after a quarter was added to the mantissa, less two.
        bits = largest(weight, weight.shape[1] // 32).view(torch.int32)
        scale = ((bits + (1 << 21) >> 23) - 2).clamp(0, 254).to(torch.uint8)
        return {"weight_packed": pack_nibbles(round_to_e2m1(steps(weight, _e8m0(scale)))), "weight_scale": scale}

    def dequantize(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        packed, scale = stored["weight_packed"], _e8m0(stored["weight_scale"])
        return scaled(lambda rows: nibbles(packed[rows], E2M1_VALUES), scale, 2 * packed.shape[1], dtype)

    def fill_random(
        self, key: str, tensor: Tensor, shape: tuple[int, int], std: float, generator: torch.Generator
    ) -> None:
        """All codes equally often; scales are the two powers of two around the wanted one."""
        if key == "weight_packed":
            tensor.random_(0, 256, generator=generator)
            return
        square = std**2 / mean_square(E2M1)
        low = next(e for e in range(-126, 127) if 4.0 ** (e + 1) > square)
        tensor.bernoulli_((square / 4.0**low - 1) / 3, generator=generator).add_(127 + low)


def _e8m0(scale: Tensor) -> Tensor:
    """uint8 -> 2^(byte − 127) in FP32."""
    return scale.view(torch.float8_e8m0fnu).float()
