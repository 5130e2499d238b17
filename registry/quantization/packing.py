"""What formats have in common: 4-bit codes in bytes, rounding to E2M1, codes times scales."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*E2M1, *(-v for v in E2M1))
"""Of the 16 codes."""
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_AT_ONCE = 1 << 23  # numbers


def round_to_e2m1(x: Tensor) -> Tensor:
    """Codes 0..15 (uint8) of the nearest E2M1 numbers, ties to the even code; magnitudes above 6 saturate."""
    magnitude = x.abs()
    bounds = torch.tensor(_MIDPOINTS, dtype=x.dtype, device=x.device)
    below = torch.bucketize(magnitude, bounds, right=False)  # a tie rounds down ...
    above = torch.bucketize(magnitude, bounds, right=True)  # ... or up:
    code = torch.where(below % 2 == 0, below, above)  # where they differ, one of the two is even
    return (code | (torch.signbit(x).long() << 3)).to(torch.uint8)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes 0..15 uint8 [out, in] -> bytes [out, in / 2], the first of two codes in the low half."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


@cache
def _pairs(values: tuple[float, ...], high_first: bool, device: torch.device) -> Tensor:
    """The two numbers in each of the 256 bytes: FP32 [256, 2]."""
    table = torch.tensor(values, dtype=torch.float32, device=device)  # vLLM loads models with BF16 as the default
    byte = torch.arange(256, device=device)
    halves = [table[byte & 0xF], table[byte >> 4]]
    return torch.stack(halves[::-1] if high_first else halves, dim=-1)


def nibbles(packed: Tensor, values: tuple[float, ...], high_first: bool = False) -> Tensor:
    """Bytes [rows, n] of two codes -> the ``values`` (16, by code) that they stand for, FP32 [rows, 2n]."""
    return embedding(packed.int(), _pairs(values, high_first, packed.device)).flatten(1)


def scaled(numbers: Callable[[slice], Tensor], scales: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """The dense weight [out, columns] from FP32 scales [out, groups], in FP32 and rounded once to ``dtype``.

    ``numbers`` gives the codes of some rows in a new FP32 tensor. Not of all at once: beside a large layer in BF16
    there is no room for several temporaries in FP32.
    """
    rows, groups = scales.shape
    dense = torch.empty(rows, columns, dtype=dtype, device=scales.device)
    step = max(1, _AT_ONCE // columns)
    for part in (slice(first, first + step) for first in range(0, rows, step)):
        code = numbers(part).view(-1, groups, columns // groups)
        dense[part] = code.mul_(scales[part].unsqueeze(-1)).view(-1, columns)
    return dense


def largest(weight: Tensor, groups: int) -> Tensor:
    """max |w| in FP32 of ``groups`` equal parts of each row: [out, groups]."""
    return weight.view(len(weight), groups, -1).abs().amax(-1).float()


def steps(weight: Tensor, scales: Tensor) -> Tensor:
    """weight [out, in] in units of the scales [out, groups], in FP32; zero where a scale is zero."""
    parts = weight.float().view(*scales.shape, -1)
    unit = scales.float().unsqueeze(-1)
    return torch.where(unit > 0, parts / unit, 0.0).view(weight.shape)


def mean_square(values: Sequence[float]) -> float:
    return sum(v * v for v in values) / len(values)


def compressed_tensors(layout: str, **weights: Any) -> dict[str, Any]:
    """``quantization_config`` of compressed-tensors for weights alone, with the arguments of its QuantizationArgs."""
    arguments = weights | {"symmetric": True, "dynamic": False, "observer": "minmax"}
    group = {"targets": ["Linear"], "weights": arguments, "format": layout}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group | {"input_activations": None, "output_activations": None}},
    }
