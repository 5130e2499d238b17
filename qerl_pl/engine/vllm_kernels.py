"""Which kernels of ours vLLM samples with on a GPU, and how they get into its layers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from qerl_pl.engine.base import EngineSpec
from registry.quantization import NVFP4, QuantFormat


@dataclass(frozen=True)
class Kernels:
    """``ours``: adapter, norms, SwiGLU, rotation. ``nvfp4``: linear layers. ``note``: what is left out, and why.
    ``backend``: vLLM's ``linear_backend``, for the quantized layers that are not ours.
    """

    ours: bool = False
    nvfp4: bool = False
    note: str | None = None
    backend: str = "auto"


def choose(spec: EngineSpec, wanted: bool, dense: bool) -> Kernels:
    """For the device of ``spec``; with ``dense`` vLLM is given BF16 weights."""
    if torch.device(spec.device).type != "cuda":
        return Kernels()
    nvfp4 = isinstance(spec.quantization, NVFP4) and not dense
    # Without FP4 units Marlin: vLLM 0.32 would take its own Humming layer on Hopper, whose tensors nothing here reads.
    backend = "marlin" if nvfp4 and torch.cuda.get_device_capability()[0] < 10 else "auto"
    if not wanted or spec.dtype != "bfloat16":
        reason = f"{spec.dtype} arithmetic needs" if wanted else "kernels: false asks for"
        note = f"vLLM: PyTorch's operations and vLLM's kernels instead of ours, as {reason}"
        return Kernels(note=note, backend=backend)
    if not nvfp4:
        return Kernels(ours=True)
    from qerl_pl.engine import vllm_nvfp4

    against = vllm_nvfp4.unusable(spec.config)
    return Kernels(True, against is None, against and f"vLLM: NVFP4 by vLLM's own kernel: {against}", backend)


@contextmanager
def patched_layers(kernels: Kernels, quantization: QuantFormat, sizes: Sequence[int]) -> Iterator[None]:
    """While the model is built: RMSNorm weights in FP32, as small noise vanishes in BF16; NVFP4's scales checked; and
    ``kernels``. ``sizes`` are the numbers of tokens in CUDA graphs.
    """
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w4a4_nvfp4 as nvfp4,
    )

    init, scheme = RMSNorm.__init__, nvfp4.CompressedTensorsW4A4Fp4
    process: Callable[[Any, Any], None] = scheme.process_weights_after_loading

    def init_float32(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "dtype": torch.float32})

    with ExitStack() as stack:
        stack.enter_context(patch.object(RMSNorm, "__init__", init_float32))
        if kernels.ours:  # vLLM's needs weights in the dtype of the activations; a layer takes its when it is made
            stack.enter_context(patch.object(RMSNorm, "forward_cuda", _norm))
        if kernels.nvfp4:
            from qerl_pl.engine.vllm_nvfp4 import Nvfp4Kernel

            kernel = Nvfp4Kernel(sizes)
            stack.enter_context(patch.object(nvfp4, "init_nvfp4_linear_kernel", lambda use_a16=False: kernel))
            process = lambda _, layer: kernel.transform(layer, quantization)  # noqa: E731
        stack.enter_context(patch.object(scheme, "process_weights_after_loading", checked(process)))
        yield


def _norm(self: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    if self.variance_size_override is not None or not self.has_weight:
        return self.forward_native(x, residual)
    from qerl_pl import decoding

    y = decoding.rms_norm(x, residual, self.weight, self.variance_epsilon)
    return y if residual is None else (y, residual)


def checked(process: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """``process`` of a fused layer, whose parts must have one global scale."""

    def checking(scheme: Any, layer: Any) -> None:
        divisors = layer.weight_global_scale.unique().tolist()
        if len(divisors) > 1:  # vLLM would take the largest for all parts, and say so in a warning only
            raise ValueError(
                f"{getattr(layer, 'prefix', 'a fused layer')} has parts of different weight_global_scale: {divisors}; "
                "layers that the engine fuses (q, k, v; gate, up) must share one: quantize them together"
            )
        process(scheme, layer)

    return checking
