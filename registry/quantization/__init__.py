"""Weight formats of the frozen base."""

from registry.quantization.base import FORMATS, FormatName, QuantFormat
from registry.quantization.bf16 import BF16
from registry.quantization.nvfp4 import NVFP4

__all__ = ["BF16", "FORMATS", "FormatName", "NVFP4", "QuantFormat"]
