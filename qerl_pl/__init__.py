"""qerl-pl: quantization-enhanced reinforcement learning (arXiv 2510.11696) on PyTorch Lightning."""

__version__ = "0.1.0"
