"""The interface of a weight format."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Never

import torch
from torch import Tensor

from registry._registry import Name, Registry


class QuantFormat(ABC):
    """How a frozen linear weight ``[out, in]`` is stored, and how it becomes numbers again.

    The stored tensors have the names and layouts of the checkpoint (``weight_packed``, ``weight_scale``, ...), so
    that reading and writing a checkpoint is no conversion.
    """

    group_size: int = 1
    """The input dimension of a weight must be a multiple of this."""
    bits_per_weight: float
    """Stored bits for one weight, scales of groups included."""
    described_by: frozenset[str] = frozenset()
    """Stored tensors that Python reads: they stay in the CPU's memory, as a GPU would have to be waited for."""

    @property
    @abstractmethod
    def config(self) -> dict[str, Any] | None:
        """``quantization_config`` of a checkpoint in this format; None if the checkpoint is not quantized."""

    @abstractmethod
    def layout(self, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each stored tensor of one weight, by name."""

    @abstractmethod
    def shape(self, stored: Mapping[str, Tensor]) -> tuple[int, int]:
        """(out, in) of the weight that ``stored`` holds."""

    @abstractmethod
    def quantize(self, weights: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Round weights ``[out_i, in]`` to nearest. They belong together: an engine fuses them, so they share what
        must be shared.
        """

    @abstractmethod
    def dequantize(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The dense weight ``[out, in]``, computed in FP32 and rounded once to ``dtype``."""

    def fill_random(
        self, key: str, tensor: Tensor, shape: tuple[int, int], std: float, generator: torch.Generator
    ) -> None:
        """Fill the stored tensor ``key`` of a weight of this shape in place, so that the weight has about this standard
        deviation. For models by shape (``random:7B``); divisors and whatever else fused weights share must not depend
        on ``generator``.
        """
        raise ValueError(
            f"quantization: {type(self).__name__} has no fill_random, which models of random weights need; "
            "implement it, or use a checkpoint"
        )

    def check(self, name: str, in_features: int) -> None:
        """Raise ValueError if a weight with this input dimension cannot be stored."""
        if in_features % self.group_size:
            raise ValueError(
                f"{name}: input dimension {in_features} is not a multiple of {self.group_size}, "
                f"which {type(self).__name__} needs; use another format, a smaller group_size if it has one, or "
                "quantization: bf16"
            )


FORMATS: Registry[QuantFormat] = Registry("quantization format", "qerl_pl.quantization")

if TYPE_CHECKING:
    FormatName = Never  # the CLI replaces a name by its class, so no code ever receives one
else:

    class FormatName(Name, registry=FORMATS):
        """A registered quantization format."""
