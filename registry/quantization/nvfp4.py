"""NVFP4: 4-bit floats with two levels of scales (paper Eq. 6; the compressed-tensors layout ``nvfp4-pack-
quantized``).
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import embedding

from registry.quantization.base import FORMATS, QuantFormat

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX, E4M3_MAX = 6.0, 448.0
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two numbers in each of the 256 bytes, low nibble first: [256, 2]."""
    values = torch.tensor([*E2M1, *(-v for v in E2M1)], device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([values[byte & 0xF], values[byte >> 4]], dim=-1)


def round_to_e2m1(x: Tensor) -> Tensor:
    """Codes 0..15 (uint8) of the nearest E2M1 numbers, ties to the even code; magnitudes above 6 saturate."""
    magnitude = x.abs()
    bounds = torch.tensor(_MIDPOINTS, dtype=x.dtype, device=x.device)
    below = torch.bucketize(magnitude, bounds, right=False)  # a tie rounds down ...
    above = torch.bucketize(magnitude, bounds, right=True)  # ... or up:
    code = torch.where(below % 2 == 0, below, above)  # where they differ, one of the two is even
    return (code | (torch.signbit(x).long() << 3)).to(torch.uint8)


@FORMATS.register("nvfp4")
class NVFP4(QuantFormat):
    """E2M1 weights, one E4M3 scale for 16 of them along the input, one FP32 global scale: Ŵ = S_FP32 · (S_E4M3 ⊙ W̃).

    The stored global scale is the divisor 448·6 / max|W|, as in compressed-tensors; weights that the engine fuses
    share it.
    """

    group_size: ClassVar[int] = 16
    bits_per_weight: ClassVar[float] = 4.5

    @property
    def config(self) -> dict[str, Any] | None:
        weights = {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "symmetric": True,
            "dynamic": False,
            "observer": "minmax",
            "scale_dtype": "torch.float8_e4m3fn",
        }
        layout = "nvfp4-pack-quantized"
        group = {"targets": ["Linear"], "weights": weights, "format": layout}
        return {
            "quant_method": "compressed-tensors",
            "format": layout,
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": group | {"input_activations": None, "output_activations": None}},
        }

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
        largest = torch.stack([w.abs().max() for w in weights]).max().float()
        divisor = (
            (E4M3_MAX * E2M1_MAX / largest.clamp(min=torch.finfo(torch.float32).tiny)).nan_to_num(posinf=1.0).reshape(1)
        )
        return [self._quantize(w.float(), divisor) for w in weights]

    def _quantize(self, weight: Tensor, divisor: Tensor) -> dict[str, Tensor]:
        rows, columns = weight.shape
        groups = weight.reshape(rows, columns // 16, 16)
        scale = (groups.abs().amax(-1) / E2M1_MAX * divisor).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
        step = (scale.float() / divisor).unsqueeze(-1)
        # Groups whose scale underflows to zero have all codes 0.
        code = round_to_e2m1(torch.where(step > 0, groups / step, 0.0)).reshape(rows, columns)
        return {
            "weight_packed": code[:, 0::2] | (code[:, 1::2] << 4),
            "weight_scale": scale,
            "weight_global_scale": divisor.clone(),
        }

    def dequantize(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        packed, scale = stored["weight_packed"], stored["weight_scale"]
        if packed.is_cuda:
            from registry.quantization import nvfp4_triton  # Triton comes with PyTorch's CUDA builds

            return nvfp4_triton.dequantize(packed, scale, stored["weight_global_scale"], dtype)
        step = scale.float() / stored["weight_global_scale"]
        codes = embedding(packed.int(), _pairs(packed.device))  # [out, in/2, 2]
        rows, groups = scale.shape
        return (codes.view(rows, groups, 16) * step.unsqueeze(-1)).view(rows, groups * 16).to(dtype)

    def fill_random(self, key: str, tensor: Tensor, std: float, generator: torch.Generator) -> None:
        """All codes equally often; scales 128, 144, ..., 240, as wide as those of real weights."""
        if key == "weight_packed":
            tensor.random_(0, 256, generator=generator)
        elif key == "weight_scale":
            tensor.view(torch.uint8).random_(0x70, 0x78, generator=generator)  # eight neighbours in E4M3
        else:
            scale, code = (sum(v * v for v in values) / 8 for values in (range(128, 241, 16), E2M1))
            tensor.fill_((scale * code) ** 0.5 / std)
