"""FP8: E4M3 weights with one scale for each output (the compressed-tensors layout ``float-quantized``)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from registry.quantization.base import FORMATS, QuantFormat
from registry.quantization.packing import compressed_tensors, largest, scaled, steps

E4M3_MAX = 448.0
_SPREAD = 64.0  # of random numbers: 448 is seven standard deviations


@FORMATS.register("fp8")
class FP8(QuantFormat):
    """Ŵ = s · E4M3 with s = max |W| / 448 of a row, in BF16; activations stay as they are."""

    bits_per_weight = 8.0

    @property
    def config(self) -> dict[str, Any] | None:
        return compressed_tensors("float-quantized", num_bits=8, type="float", strategy="channel")

    def layout(self, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            "weight": ((out_features, in_features), torch.float8_e4m3fn),
            "weight_scale": ((out_features, 1), torch.bfloat16),
        }

    def shape(self, stored: Mapping[str, Tensor]) -> tuple[int, int]:
        rows, columns = stored["weight"].shape
        return rows, columns

    def quantize(self, weights: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        scales = [(largest(w, 1) / E4M3_MAX).bfloat16() for w in weights]
        codes = [steps(w, s).clamp(-E4M3_MAX, E4M3_MAX) for w, s in zip(weights, scales, strict=True)]
        return [{"weight": c.to(torch.float8_e4m3fn), "weight_scale": s} for c, s in zip(codes, scales, strict=True)]

    def dequantize(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        codes = stored["weight"]
        return scaled(lambda rows: codes[rows].float(), stored["weight_scale"].float(), codes.shape[1], dtype)

    def fill_random(
        self, key: str, tensor: Tensor, shape: tuple[int, int], std: float, generator: torch.Generator
    ) -> None:
        if key == "weight_scale":
            tensor.fill_(std / _SPREAD)
        else:
            normal = torch.randn(shape, generator=generator, dtype=torch.float32, device=tensor.device)
            tensor.copy_(normal.mul_(_SPREAD).clamp_(-E4M3_MAX, E4M3_MAX))
