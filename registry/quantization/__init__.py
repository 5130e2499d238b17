"""Weight formats of the frozen base."""

from registry.quantization.base import FORMATS, FormatName, QuantFormat
from registry.quantization.bf16 import BF16
from registry.quantization.fp8 import FP8
from registry.quantization.integer import Int4, Int8
from registry.quantization.mxfp4 import MXFP4
from registry.quantization.nf4 import NF4
from registry.quantization.nvfp4 import NVFP4

__all__ = ["BF16", "FORMATS", "FP8", "FormatName", "Int4", "Int8", "MXFP4", "NF4", "NVFP4", "QuantFormat"]
