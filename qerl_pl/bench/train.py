"""Forward and backward of one micro-batch."""

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qerl_pl.bench import peers
from qerl_pl.bench.results import (
    Results,
    choices,
    device,
    free_memory,
    limit_memory,
    numbers,
    peak,
    seconds,
    spread,
    synchronize,
)  # fmt: skip
from qerl_pl.bench.spec import random_spec, shapes
from qerl_pl.engine.base import EngineSpec
from qerl_pl.engine.vllm import VLLMEngine
from qerl_pl.policy import ALL, Policy
from qerl_pl.random_model import parameters
from registry.quantization import FORMATS

VARIANTS = ("ours", "shared", *peers.LINEARS)


def train(
    model: str = "7B",
    format: str = "nvfp4,bf16",
    variant: str = "ours",
    rank: str = "32",
    tokens: int = 16384,
    prompt_length: int = 256,
    completion_length: int = 128,
    checkpointing: str = "none",
    repeats: int = 5,
    memory_gb: float | None = None,
    output: Path | None = None,
    commit: str | None = None,
) -> None:
    """Forward + backward of a micro-batch: the project's policy, and what people use otherwise.

    ``tflops`` counts what the model needs and no more: 4 · (projections · tokens + head · completion tokens) and the
    causal half of attention; neither the adapter nor what is computed twice. ``share`` is its part of the rate of an
    8192³ BF16 product (on a CPU 256³), measured just before.

    Args:
        model: shapes, separated by commas; all but tiny-test need a GPU.
        format: weight formats of ``ours`` and ``shared``; the peers have their own.
        variant: ours (the policy with a packed copy of its own); shared (it computes from the tensors of a vLLM engine
            beside it, on a GPU); peft-bf16, peft-nf4 (bitsandbytes), decompress (compressed-tensors in every forward).
        rank: of the adapter.
        tokens: of the micro-batch, filled with equal sequences.
        prompt_length: tokens of a sequence that have no log-probability.
        completion_length: tokens of a sequence that have one.
        checkpointing: none, full (activations of every block again in backward), or of ours and shared so many blocks.
        repeats: timed calls, after two to warm up.
        memory_gb: memory of the GPU that may be used, as on a smaller card.
        output: JSON file to add the rows to.
        commit: of the code, where this is no git checkout.
    """
    variants = choices("variant", variant, VARIANTS)
    formats = choices("format", format, list(FORMATS))
    if not checkpointing.isdigit() or set(variants) & peers.LINEARS.keys():
        choices("checkpointing", checkpointing, ("none", "full"))
    if tokens < prompt_length + completion_length:
        raise ValueError(f"--tokens {tokens} hold no sequence of {prompt_length} + {completion_length}; raise it")
    if "shared" in variants and not torch.cuda.is_available():
        raise ValueError("--variant shared needs a GPU: vLLM's CPU build repacks its weights; leave it out")
    peers.check(variants)
    limit_memory(memory_gb)
    models = shapes(model)
    results = Results("train", output, commit)
    for name in models:
        for kind in variants:
            for form in formats if kind in ("ours", "shared") else [peers.FORMAT[kind]]:
                for size in numbers(rank):
                    what = {
                        "model": name, "format": form, "variant": kind, "rank": size, "checkpointing": checkpointing,
                        "tokens": tokens, "prompt_length": prompt_length, "completion_length": completion_length,
                        "memory_gb": memory_gb,
                    }  # fmt: skip
                    with results.candidate(what):
                        results.add(what, _measure(what, repeats))
    results.finish()


def _measure(what: dict[str, Any], repeats: int) -> dict[str, Any]:
    kind = what["variant"]
    stored = "bf16" if kind == "peft-nf4" else what["format"]  # bitsandbytes quantizes while loading
    length = what["prompt_length"] + what["completion_length"]
    spec = random_spec(what["model"], stored, what["rank"], length, length)  # the cache is that of ``shared``
    settings = spec.config
    free_memory()
    if kind == "shared":
        engine = VLLMEngine(max_num_seqs=1, enforce_eager=True)  # nothing is sampled
        engine.start(spec)
        try:
            return _time(what, settings, repeats, lambda: ours(spec, what["checkpointing"], engine.shared_weights()))
        finally:
            engine.close()
    if kind == "ours":
        return _time(what, settings, repeats, lambda: ours(spec, what["checkpointing"]))
    return _time(what, settings, repeats, lambda: peers.Peer(kind, spec, what["checkpointing"]))


def ours(spec: EngineSpec, checkpointing: str, shared: Mapping[str, Any] | None = None) -> Policy:
    layers = {"none": 0, "full": ALL}.get(checkpointing)
    return Policy(spec, shared, int(checkpointing) if layers is None else layers)


def _time(
    what: dict[str, Any], settings: Mapping[str, Any], repeats: int, build: Callable[[], nn.Module]
) -> dict[str, Any]:
    where, _ = device()
    began = time.perf_counter()
    model = build()
    synchronize()
    start = time.perf_counter() - began
    loaded = {"model_gb": torch.cuda.memory_allocated() / 1e9} if where == "cuda" else {}

    generator = torch.Generator().manual_seed(0)
    length = what["prompt_length"] + what["completion_length"]
    sequences = what["tokens"] // length
    tokens = torch.randint(2, settings["vocab_size"], (sequences, length), generator=generator).to(where)
    lengths = torch.full((sequences,), length, device=where)
    mask = (torch.arange(length, device=where) >= what["prompt_length"]).expand(sequences, length)
    learned = [p for p in model.parameters() if p.requires_grad]

    def step() -> None:
        out = model(tokens, lengths, mask)
        logprobs = out[0] if isinstance(out, tuple) else out  # the policy also gives the entropy
        (-logprobs.sum() / mask.sum()).backward()
        for parameter in learned:
            parameter.grad = None

    rate = matmul_tflops(where)
    free_memory()
    times = seconds(step, repeats, warm_up=2)
    count = flops(settings, sequences, what["prompt_length"], what["completion_length"])
    tflops = [count / t / 1e12 for t in times]
    return {
        **spread("milliseconds", [1e3 * t for t in times]),
        **spread("tokens_per_s", [sequences * length / t for t in times]),
        **spread("tflops", tflops),
        "matmul_tflops": rate,
        "share": statistics.median(tflops) / rate,
        **peak(),
        **loaded,
        "start_s": start,
        "repeats": repeats,
    }


def flops(settings: Mapping[str, Any], sequences: int, prompt_length: int, completion_length: int) -> float:
    """Floating-point operations of forward and backward under a frozen base: of weights no gradient is taken."""
    length = prompt_length + completion_length
    head = settings["vocab_size"] * settings["hidden_size"] * completion_length
    linear = 4 * (parameters(settings) * length + head)
    # Forward 2 · 2 · L² · H, of which causality leaves half; backward twice that.
    attention = 6 * length**2 * settings["hidden_size"] * settings["num_hidden_layers"]
    return float(sequences * (linear + attention))


def matmul_tflops(where: str) -> float:
    """Measured rate of one large BF16 product: the median of 20."""
    size = 8192 if where == "cuda" else 256
    a, b = (torch.randn(size, size, device=where, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / statistics.median(seconds(lambda: a @ b, 20, warm_up=5)) / 1e12
