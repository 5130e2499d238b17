"""What trainer and vLLM share on one GPU: the base's weights, and the memory of keys and values between rollouts."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from qerl_pl.checkpoint import FUSED
from qerl_pl.engine import vllm_compat
from qerl_pl.engine.base import CannotShareError
from qerl_pl.engine.vllm_adapter import fused_layers
from qerl_pl.marlin import TiledWeight
from qerl_pl.memory import Shape
from qerl_pl.packed import DenseWeight, Weight

CACHE_TAG = "kv_cache"  # vLLM's name of the pool


def linear_weights(llm: Any) -> Iterator[tuple[str, Weight]]:
    """The weight of every projection by Hugging Face's name; those that vLLM computes as one are parts of a tensor."""
    for layer, parts in fused_layers(vllm_compat.model(llm)):
        if hasattr(layer, "humming"):
            from qerl_pl.engine import vllm_nvfp4

            names, sizes = zip(*parts, strict=True)
            yield from zip(names, vllm_nvfp4.weights(layer, list(sizes)), strict=True)
            continue
        first = 0
        for name, size in parts:
            yield name, _weight(name, layer, first, size)
            first += size


def padded(config: Mapping[str, Any]) -> bool:
    """Whether Marlin pads the NVFP4 weights of a model with this ``config.json``: it takes outputs and inputs in
    multiples of 64 and 128, or of 128 and 64. (Humming refuses such shapes.) They are not shared then.
    """
    shapes = Shape.read(config).projections
    sizes = [(sum(shapes[name][0] for name in group), shapes[group[0]][1]) for group in FUSED]
    return any((rows % 64 or columns % 128) and (rows % 128 or columns % 64) for rows, columns in sizes)


def _weight(name: str, layer: Any, first: int, size: int) -> Weight:
    outputs, inputs = sum(layer.output_partition_sizes), layer.input_size_per_partition
    weight, scales = getattr(layer, "weight", None), getattr(layer, "weight_scale", None)
    if weight is None:
        raise CannotShareError(f"vLLM holds {name} in a layout that the trainer does not read")
    if scales is None and weight.dtype.is_floating_point and weight.shape == (outputs, inputs):
        return DenseWeight(weight.detach()[first : first + size])
    marlin = weight.dtype == torch.int32 and weight.shape == (inputs // 16, 2 * outputs)
    if scales is None or not marlin or scales.shape != (inputs // 16, outputs):
        raise CannotShareError(
            f"vLLM holds {name} as {weight.dtype} {list(weight.shape)}, not in Marlin's NVFP4 layout"
        )
    scale = TiledWeight.global_scale(float(layer.weight_global_scale))
    return TiledWeight(weight.detach(), scales.detach(), scale, first, size)


def embedding_weights(llm: Any) -> dict[str, Tensor]:
    """Embeddings and head [vocabulary, H] by Hugging Face's name, without vLLM's padding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    kind: Any = VocabParallelEmbedding
    return {
        name: module.weight.detach()[: module.org_vocab_size]
        for name, module in vllm_compat.model(llm).named_modules()
        if isinstance(module, kind)
    }


@contextmanager
def releasable_cache() -> Iterator[None]:
    """While the engine is built: allocate keys and values, and nothing else, so that their memory can be released.

    0.26 would put attention's own buffers into the same pool, whose loss ends in illegal memory accesses.
    """
    from vllm.v1.worker import gpu_model_runner, gpu_worker
    from vllm.v1.worker.gpu import attn_utils

    pool = _allocator().use_memory_pool
    places: list[tuple[Any, str]] = [  # of both model runners, in the older releases
        (attn_utils, "_allocate_kv_cache"),
        (gpu_model_runner.GPUModelRunner, "_allocate_kv_cache_tensors"),
    ]

    def pooled(allocate: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with pool(tag=CACHE_TAG):
                return allocate(*args, **kwargs)

        return wrapped

    def context(worker: Any, tag: str) -> Any:
        return pool(tag=tag) if tag == CACHE_TAG else nullcontext()

    with ExitStack() as stack:
        old = [(place, name) for place, name in places if hasattr(place, name)]
        for place, name in old:
            stack.enter_context(patch.object(place, name, pooled(getattr(place, name))))
        if not old:
            stack.enter_context(patch.object(gpu_worker.Worker, "_maybe_get_memory_pool_context", context))
        yield
    if not _allocator().get_current_usage():
        raise RuntimeError(
            "vLLM allocated its KV cache where it cannot be released; set engine.release_kv_cache: false"
        )


def _allocator() -> Any:
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance()


def release_cache() -> None:
    """Unmap the memory of keys and values; their addresses, which CUDA graphs know, stay reserved."""
    torch.cuda.synchronize()
    _allocator().sleep(offload_tags=())


def restore_cache(llm: Any) -> None:
    """Map fresh memory, as zeros: attention multiplies what lies behind a sequence by 0, and 0 · NaN is NaN."""
    _allocator().wake_up([CACHE_TAG])
    for tensor in _caches(llm):
        tensor.zero_()


def cache_bytes(llm: Any) -> int:
    return vllm_compat.storage_bytes(_caches(llm))


def _caches(llm: Any) -> list[Tensor]:
    return list(llm.llm_engine.model_executor.driver_worker.worker.model_runner.kv_caches)
