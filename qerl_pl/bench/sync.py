"""Time to bring adapter and noise into a running engine."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from qerl_pl.bench.results import Results, choices, device, free_memory, limit_memory, numbers, peak, seconds, spread
from qerl_pl.bench.spec import random_spec, shapes
from qerl_pl.callbacks.sync import deliver
from qerl_pl.engine import ENGINES, Engine, VLLMEngine
from qerl_pl.noise import NormNoise
from registry.quantization import FORMATS

NORMS = ("input_layernorm", "post_attention_layernorm")


def sync(
    model: str = "7B",
    format: str = "nvfp4",
    engine: str = "vllm",
    rank: str = "32",
    repeats: int = 20,
    memory_gb: float | None = None,
    output: Path | None = None,
    commit: str | None = None,
) -> None:
    """Time to bring adapter and noise into a running engine, separately and together.

    Phase ``adapter`` is what happens after each update: copy, reset of the prefix cache, read back and compare.
    ``noise`` is drawing the noise of a step, writing it onto both norms of each block, and the reset.

    Args:
        model: shapes, separated by commas; all but tiny-test need a GPU.
        format: weight formats.
        engine: vllm or transformers.
        rank: of the adapter.
        repeats: timed calls, after two to warm up.
        memory_gb: memory of the GPU that may be used, as on a smaller card.
        output: JSON file to add the rows to.
        commit: of the code, where this is no git checkout.
    """
    formats = choices("format", format, list(FORMATS))
    engines = choices("engine", engine, list(ENGINES))
    limit_memory(memory_gb)
    models = shapes(model)
    results = Results("sync", output, commit)
    for name in models:
        for form in formats:
            for kind in engines:
                for size in numbers(rank):
                    what = {"model": name, "format": form, "variant": kind, "rank": size, "memory_gb": memory_gb}
                    with results.candidate(what):
                        _measure(results, what, repeats)
    results.finish()


def _measure(results: Results, what: dict[str, Any], repeats: int) -> None:
    where, _ = device()
    spec = random_spec(what["model"], what["format"], what["rank"], max_length=512)
    free_memory()
    engine = _engine(what["variant"], where)
    engine.start(spec)
    try:
        measure(results, what, engine, repeats)
    finally:
        engine.close()


def measure(results: Results, what: dict[str, Any], engine: Engine, repeats: int) -> None:
    """One row a phase, on an engine that runs."""
    where, _ = device()
    # As the trainer's: FP32, on the same device, one tensor a matrix.
    tensors = {name: 0.01 * torch.randn(held.shape, device=where) for name, held in engine.adapter().items()}
    trainer: Any = SimpleNamespace(datamodule=SimpleNamespace(engine=engine))
    policy = SimpleNamespace(adapter_parameters=lambda: tensors, norm_parameters=dict)
    module = SimpleNamespace(policy=policy)
    noise = NormNoise(engine.norms(), NORMS, seed=0)

    def send_adapter() -> None:
        deliver(trainer, module)

    def send_noise() -> None:
        noise.apply(0.01, step=1)
        engine.refresh()

    def send_both() -> None:
        send_adapter()
        send_noise()

    phases: dict[str, Callable[[], None]] = {"adapter": send_adapter, "noise": send_noise, "both": send_both}
    for phase, call in phases.items():
        milliseconds = [1e3 * t for t in seconds(call, repeats, warm_up=2)]
        size = sum(t.numel() for t in tensors.values())
        measured = {**spread("milliseconds", milliseconds), "adapter_parameters": size, **peak()}
        results.add(what | {"phase": phase}, measured | {"norms": len(noise.live), "repeats": repeats})


def _engine(kind: str, where: str) -> Engine:
    if kind != "vllm":
        return ENGINES[kind]()
    # Graphs are not replayed here, but without them the engine would be another.
    return VLLMEngine(max_num_seqs=8, kv_cache_gb=0.1 if where == "cpu" else 2.0, cudagraph_sizes=[1, 8])
