"""qerl-pl: quantization-enhanced reinforcement learning (arXiv 2510.11696) on PyTorch Lightning."""

import logging

__version__ = "0.1.0"

# What bitsandbytes says of a kernel for CPUs when PEFT imports it: nothing to do about, and nothing here needs it.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: not record.getMessage().startswith("Failed to load CPU gemm_4bit_forward")
)
