"""Where the time of a decoding step goes: kernels by kind, gaps between them, against the bytes that must be read.

    python benchmarks/decode.py --model 14B --batch 1,8,64,256 --output benchmarks/results/h200/decode.json

Needs a GPU. One engine; each batch is profiled over some decoding steps after a warm-up.
"""

import argparse
import re
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from qerl_pl.bench.results import Results, free_memory, numbers
from qerl_pl.bench.rollout import BLOCKS, Ours, Stock
from qerl_pl.bench.spec import random_spec

KINDS = {
    "adapter": "_shrink|_expand|_swiglu|^_rotary|sum_functor|lora_",
    "attention": "flash|fmha|attention|reshape_and_cache|prepare_varlen",
    "norm": "_norm",
    "rotary": "rotary",
    "activation": "silu|act_and_mul",
    "linear": "humming|decode_linear|marlin|machete|gemm|nvjet|xmma|cutlass|gemv|splitK|w4a16",
    "sampler": "gumbel|softmax|topk|top_k|logprob|argmax|rank|sort|scatter|temperature",
    "copy": "memcpy|memset",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="14B")
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--variant", default="ours")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--batch", default="1,8,64,256")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes per second of a copy on this card")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    batches = numbers(arguments.batch)
    results = Results("decode", arguments.output, arguments.commit)
    length = 256 + arguments.tokens
    spec = random_spec(arguments.model, arguments.format, arguments.rank, length, max(batches) * (length + BLOCKS))
    free_memory()
    began = time.perf_counter()
    scratch = tempfile.TemporaryDirectory()
    stock = arguments.variant == "stock"
    engine: Any = Stock(spec, batches, Path(scratch.name)) if stock else Ours(spec, batches)
    print(f"start {time.perf_counter() - began:.1f} s, {engine.model_bytes() / 1e9:.2f} GB")
    what = {"model": arguments.model, "format": arguments.format, "variant": arguments.variant, "rank": arguments.rank}
    for batch in batches:
        results.add(what | {"batch": batch}, measure(engine, spec.config, batch, arguments.tokens, arguments.bandwidth))
    engine.close()
    results.finish()


def measure(engine: Any, config: dict[str, Any], batch: int, tokens: int, bandwidth: float) -> dict[str, Any]:
    """A profile of ``batch`` sequences, after 16 steps of others."""

    def once(length: int) -> None:
        engine.generate(torch.randint(2, config["vocab_size"], (batch, 256)).tolist(), length)

    once(16)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        once(tokens)
    # Of embeddings that are not the head too, a step reads only a row a token.
    looked_up = 0 if config["tie_word_embeddings"] else 2 * config["vocab_size"] * config["hidden_size"]
    return breakdown(profiler, tokens) | {"limit_us": 1e6 * (engine.model_bytes() - looked_up) / bandwidth}


def breakdown(profiler: Any, tokens: int) -> dict[str, Any]:
    """Microseconds of one decoding step by kind of kernel, over the last half of ``tokens`` steps."""
    events = sorted(
        (e.start_ns() / 1e3, e.duration_ns() / 1e3, e.name())
        for e in profiler.profiler.kineto_results.events()
        if e.device_type() == torch.autograd.DeviceType.CUDA
    )
    # A step has one kernel that samples; between two of them lies one step. The prompts are computed in the first.
    marks = [start for start, _, name in events if re.search("gumbel", name)][-(tokens // 2) :]
    if len(marks) < 3:
        raise RuntimeError(f"{len(marks)} steps were found in the profile; the sampler's kernel has another name here")
    first, last, steps = marks[0], marks[-1], len(marks) - 1
    kinds: dict[str, float] = defaultdict(float)
    names: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    busy, until, kernels = 0.0, first, 0
    for start, duration, name in events:
        if not first <= start < last:
            continue
        kind = next((k for k, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")
        kinds[kind] += duration / steps
        names[name[:90]][0] += duration / steps
        names[name[:90]][1] += 1 / steps
        busy += max(0.0, start + duration - max(start, until))
        until = max(until, start + duration)
        kernels += 1
    top = sorted(names.items(), key=lambda item: -item[1][0])[:24]
    for name, (time_, count) in top:
        print(f"{time_:9.1f} us {count:7.1f} x  {name}")
    return {
        "step_us": (last - first) / steps,
        "busy_us": busy / steps,
        "kernels": kernels / steps,
        **{f"{kind}_us": round(value, 1) for kind, value in sorted(kinds.items())},
    }


if __name__ == "__main__":
    main()
