"""NVFP4: 4-bit floats with two levels of scales (paper Eq. 6; the compressed-tensors layout ``nvfp4-pack-
quantized``).
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

E2M1_MAX, E4M3_MAX = 6.0, 448.0


@FORMATS.register("nvfp4")
class NVFP4(QuantFormat):
    """E2M1 weights, one E4M3 scale for 16 of them along the input, one FP32 global scale: Ŵ = S_FP32 · (S_E4M3 ⊙ W̃).

    The stored global scale is the divisor 448·6 / max|W|, as in compressed-tensors; weights that the engine fuses
    share it.
    """

    group_size = 16
    bits_per_weight = 4.5

    @property
    def config(self) -> dict[str, Any] | None:
        scales = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
        return compressed_tensors("nvfp4-pack-quantized", num_bits=4, type="float", **scales)

    def layout(self, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            "weight_packed": ((out_features, in_features // 2), torch.uint8),
            "weight_scale": ((out_features, in_features // 16), torch.float8_e4m3fn),
            "weight_global_scale": ((1,), torch.float32),
        }

    def shape(self, stored: Mapping[str, Tensor]) -> tuple[int, int]:
        rows, half = stored["weight_packed"].shape
        return rows, 2 * half

    def quantize(self, weights: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        top = torch.stack([w.abs().max() for w in weights]).max().float()
        divisor = (
            (E4M3_MAX * E2M1_MAX / top.clamp(min=torch.finfo(torch.float32).tiny)).nan_to_num(posinf=1.0).reshape(1)
        )
        return [self._quantize(w, divisor) for w in weights]

    def _quantize(self, weight: Tensor, divisor: Tensor) -> dict[str, Tensor]:
        exact = largest(weight, weight.shape[1] // 16) / E2M1_MAX * divisor
        scale = exact.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
        # Groups whose scale underflows to zero have all codes 0.
        return {
            "weight_packed": pack_nibbles(round_to_e2m1(steps(weight, scale.float() / divisor))),
            "weight_scale": scale,
            "weight_global_scale": divisor.clone(),
        }

    def dequantize(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        packed, scale = stored["weight_packed"], stored["weight_scale"]
        if packed.is_cuda:
            from registry.quantization import nvfp4_triton  # Triton comes with PyTorch's CUDA builds

            return nvfp4_triton.dequantize(packed, scale, stored["weight_global_scale"], dtype)
        step = scale.float() / stored["weight_global_scale"]
        return scaled(lambda rows: nibbles(packed[rows], E2M1_VALUES), step, 2 * packed.shape[1], dtype)

    def fill_random(
        self, key: str, tensor: Tensor, shape: tuple[int, int], std: float, generator: torch.Generator
    ) -> None:
        """All codes equally often; scales 128, 144, ..., 240, as wide as those of real weights."""
        if key == "weight_packed":
            tensor.random_(0, 256, generator=generator)
        elif key == "weight_scale":
            tensor.view(torch.uint8).random_(0x70, 0x78, generator=generator)  # eight neighbours in E4M3
        else:
            tensor.fill_((mean_square(range(128, 241, 16)) * mean_square(E2M1)) ** 0.5 / std)
