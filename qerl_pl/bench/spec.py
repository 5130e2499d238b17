"""What is measured: a model of random weights, on the device that is there."""

from dataclasses import replace

from qerl_pl.bench.results import choices, device
from qerl_pl.checkpoint import PROJECTIONS, prepare
from qerl_pl.engine.base import EngineSpec
from qerl_pl.memory import GB, UNUSED, Shape, adapter_size, engine_bytes, kv_bytes_per_token, sampler_bytes
from qerl_pl.random_model import PREFIX, SHAPES
from registry.quantization import FORMATS


def shapes(text: str) -> list[str]:
    """Those of ``--model``. Without a GPU only the smallest: the others would run for hours."""
    found = choices("model", text, list(SHAPES))
    if device()[0] == "cpu" and (large := [name for name in found if name != "tiny-test"]):
        raise ValueError(f"--model {','.join(large)} needs a GPU, and there is none; --model tiny-test runs everywhere")
    return found


def random_spec(model: str, format: str, rank: int, max_length: int, kv_tokens: int = 0) -> EngineSpec:
    """A shape (``7B``) in a format, with a KV cache for so many tokens.

    Without ``kv_tokens`` the size of the cache is the engine's affair. Rank 0 has no target.
    """
    where, dtype = device()
    quantization = FORMATS[format]()
    folder = prepare(PREFIX + model, quantization)
    targets = PROJECTIONS if rank else ()
    spec = EngineSpec(folder, quantization, max(rank, 1), float(max(rank, 1)), targets, dtype, where, max_length)
    if not kv_tokens:
        return spec
    # On the CPU keys and values are FP32.
    token = kv_bytes_per_token(Shape.read(spec.config)) * (2 if where == "cpu" else 1)
    return replace(spec, kv_cache_bytes=kv_tokens * token)


def sequences_within(spec: EngineSpec, budget_gb: float, length: int, batched_tokens: int, most: int) -> int:
    """So many sequences of ``length`` tokens a card of ``budget_gb`` has room for beside the model, at most ``most``.

    As in the memory plan, of which a sampler alone has but a part.
    """
    shape, adapter = Shape.read(spec.config), adapter_size(Shape.read(spec.config), spec.rank, spec.targets)
    taken = sampler_bytes(shape, spec.quantization.bits_per_weight, adapter) + engine_bytes(shape, batched_tokens, most)
    free = int((1 - UNUSED) * budget_gb * GB) - taken
    return max(0, min(most, free // (kv_bytes_per_token(shape) * length)))
