"""Tokens per second while sampling."""

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qerl_pl.bench.results import (
    Results,
    choices,
    free_memory,
    limit_memory,
    names,
    numbers,
    peak,
    seconds,
    spread,
)  # fmt: skip
from qerl_pl.bench.spec import random_spec
from qerl_pl.engine.base import EngineSpec
from qerl_pl.random_model import projections
from qerl_pl.types import Sampling
from registry.quantization import FORMATS

VARIANTS = ("stock", "ours")


def rollout(
    model: str = "7B",
    format: str = "nvfp4,bf16",
    variant: str = "stock,ours",
    rank: str = "32",
    batch: str = "1,2,8,64,256",
    prompt_length: int = 256,
    completion_length: int = 128,
    repeats: int = 3,
    memory_gb: float | None = None,
    output: Path | None = None,
    commit: str | None = None,
) -> None:
    """Tokens per second of vLLM with an adapter: stock settings, and the project's engine.

    Prompts are random and new in every repeat, so their prefill counts. At temperature 1, with log-probabilities.

    Args:
        model: shapes, separated by commas.
        format: weight formats.
        variant: stock (vllm.LLM, the adapter from a file) and ours (the project's engine).
        rank: of the adapter; 0 is the base without LoRA, of stock alone.
        batch: completions sampled at the same time.
        prompt_length: tokens.
        completion_length: tokens.
        repeats: timed calls of each batch, after a warm-up.
        memory_gb: memory of the GPU that may be used, as on a smaller card.
        output: JSON file to add the rows to.
        commit: of the code, where this is no git checkout.
    """
    batches, variants = numbers(batch), choices("variant", variant, VARIANTS)
    formats = choices("format", format, list(FORMATS))
    limit_memory(memory_gb)
    results = Results("rollout", output, commit)
    for name in names(model):
        for form in formats:
            for size in numbers(rank):
                for kind in variants if size else ["stock"]:
                    what = {
                        "model": name, "format": form, "variant": kind, "rank": size, "memory_gb": memory_gb,
                        "prompt_length": prompt_length, "completion_length": completion_length,
                    }  # fmt: skip
                    with results.candidate(what):
                        _measure(results, what, batches, repeats)
    results.finish()


def _measure(results: Results, what: dict[str, Any], batches: Sequence[int], repeats: int) -> None:
    """One engine, all batches."""
    length = what["prompt_length"] + what["completion_length"]
    spec = random_spec(what["model"], what["format"], what["rank"], length, max(batches))
    vocabulary = spec.config["vocab_size"]
    free_memory()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        stock = what["variant"] == "stock"
        engine = Stock(spec, batches, Path(scratch)) if stock else Ours(spec, batches)
        started = time.perf_counter() - began
        try:
            draws = torch.Generator().manual_seed(0)
            for batch in batches:
                counts: list[int] = []

                def once(tokens: int, batch: int = batch, counts: list[int] = counts) -> None:
                    prompts = torch.randint(2, vocabulary, (batch, what["prompt_length"]), generator=draws)
                    counts.append(engine.generate(prompts.tolist(), tokens))

                once(min(24, what["completion_length"]))
                times = seconds(lambda: once(what["completion_length"]), repeats)
                rates = [count / time for count, time in zip(counts[-repeats:], times, strict=True)]
                measured = {
                    **spread("tokens_per_s", rates), **spread("milliseconds", [1e3 * t for t in times]),
                    "model_gb": engine.model_bytes() / 1e9, **peak(), "start_s": started, "repeats": repeats,
                }  # fmt: skip
                results.add(what | {"batch": batch}, measured)
        finally:
            engine.close()


class Ours:
    """The project's engine, through its own interface."""

    def __init__(self, spec: EngineSpec, batches: Sequence[int]) -> None:
        from qerl_pl.engine import VLLMEngine

        self.engine = VLLMEngine(max_num_seqs=max(batches), cudagraph_sizes=sorted(set(batches)))
        self.engine.start(spec)
        self.engine.load_adapter({n: 0.01 * torch.randn(t.shape) for n, t in self.engine.adapter().items()})
        self.engine.refresh()
        self.calls = 0

    def generate(self, prompts: list[list[int]], tokens: int) -> int:
        self.calls += 1
        seeds = range(self.calls * 10**6, self.calls * 10**6 + len(prompts))
        groups = self.engine.generate(prompts, Sampling(1, tokens), seeds)
        return sum(len(completion.token_ids) for group in groups for completion in group)

    def model_bytes(self) -> int:
        return self.engine.model_bytes()

    def close(self) -> None:
        self.engine.close()


class Stock:
    """vLLM's own class, with an adapter from a file."""

    def __init__(self, spec: EngineSpec, batches: Sequence[int], scratch: Path) -> None:
        from qerl_pl.engine.vllm_stock import StockVLLM

        adapter = write_adapter(spec, scratch) if spec.rank else None
        self.llm = StockVLLM(spec, max(batches), adapter, sorted(set(batches)))

    def generate(self, prompts: list[list[int]], tokens: int) -> int:
        return self.llm.generate(prompts, tokens)

    def model_bytes(self) -> int:
        return self.llm.model_bytes()

    def close(self) -> None:
        self.llm.close()


def write_adapter(spec: EngineSpec, folder: Path) -> Path:
    """A PEFT folder with random matrices for every projection."""
    from safetensors.torch import save_file

    settings = spec.config
    tensors = {}
    for layer in range(settings["num_hidden_layers"]):
        for name, (rows, columns) in projections(settings).items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = 0.01 * torch.randn(spec.rank, columns, dtype=torch.bfloat16)
            tensors[f"{prefix}.lora_B.weight"] = 0.01 * torch.randn(rows, spec.rank, dtype=torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": spec.rank, "lora_alpha": spec.alpha, "bias": "none",
        "target_modules": list(spec.targets),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
