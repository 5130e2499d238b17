"""NF4: quantiles of the normal distribution (QLoRA, arXiv 2305.14314; the layout of bitsandbytes, as transformers saves
it).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from registry.quantization.base import FORMATS, QuantFormat
from registry.quantization.packing import largest, mean_square, nibbles, pack_nibbles, scaled, steps

NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Of the 16 codes (QLoRA, appendix E)."""
_STATE = "weight.quant_state.bitsandbytes__nf4"


@FORMATS.register("nf4")
class NF4(QuantFormat):
    """One of 16 quantiles times one FP32 max |W| for 64 weights; scales are not quantized once more.

    Two codes are in a byte, the first in the high half. Blocks run over the flattened weight; as the input dimension
    is a multiple of 64 they end where rows do.
    """

    group_size = 64
    bits_per_weight = 4.5
    described_by = frozenset([_STATE])

    @property
    def config(self) -> dict[str, Any] | None:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_compute_dtype": "bfloat16",
            "llm_int8_skip_modules": ["lm_head"],
        }

    def layout(self, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            "weight": ((out_features * in_features // 2, 1), torch.uint8),
            "weight.absmax": ((out_features * in_features // 64,), torch.float32),
            "weight.quant_map": ((16,), torch.float32),
            _STATE: ((len(_state(out_features, in_features)),), torch.uint8),
        }

    def shape(self, stored: Mapping[str, Tensor]) -> tuple[int, int]:
        rows, columns = json.loads(bytes(stored[_STATE].tolist()))["shape"]
        return rows, columns

    def quantize(self, weights: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        return [self._quantize(w) for w in weights]

    def _quantize(self, weight: Tensor) -> dict[str, Tensor]:
        scale = largest(weight, weight.shape[1] // 64)
        values = torch.tensor(NF4_VALUES, dtype=torch.float32, device=weight.device)
        code = torch.bucketize(steps(weight, scale), (values[1:] + values[:-1]) / 2).to(torch.uint8)
        return {
            "weight": pack_nibbles(code.view(-1, 2).flip(1)),
            "weight.absmax": scale.flatten(),
            "weight.quant_map": values,
            _STATE: torch.tensor(list(_state(*weight.shape)), dtype=torch.uint8, device=weight.device),
        }

    def dequantize(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        rows, columns = self.shape(stored)
        packed, scale = stored["weight"].view(rows, -1), stored["weight.absmax"].view(rows, -1)
        return scaled(lambda part: nibbles(packed[part], NF4_VALUES, high_first=True), scale, columns, dtype)

    def fill_random(
        self, key: str, tensor: Tensor, shape: tuple[int, int], std: float, generator: torch.Generator
    ) -> None:
        """All codes equally often; scales of 0.5 to 1.5 times their mean."""
        if key == "weight":
            tensor.random_(0, 256, generator=generator)
        elif key == "weight.absmax":
            square = mean_square(NF4_VALUES) * 13 / 12  # 1 + the variance of the scales
            tensor.uniform_(0.5, 1.5, generator=generator).mul_(std / square**0.5)
        else:
            numbers = NF4_VALUES if key == "weight.quant_map" else list(_state(*shape))
            tensor.copy_(torch.tensor(numbers, dtype=tensor.dtype))


def _state(out_features: int, in_features: int) -> bytes:
    """bitsandbytes' description of the weight."""
    described = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [out_features, in_features]}
    return json.dumps(described).encode()
