"""Tokens per second while sampling."""

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qerl_pl.bench.results import Results, choices, free_memory, limit_memory, numbers, peak, seconds, spread
from qerl_pl.bench.spec import random_spec, sequences_within, shapes
from qerl_pl.engine.base import EngineSpec
from qerl_pl.random_model import projections
from qerl_pl.types import Sampling
from registry.quantization import FORMATS

VARIANTS = ("stock", "ours")
LONG = 2048
"""Tokens of a completion in the row of ``budget_gb``."""
BLOCKS = 128
"""Tokens that a sequence takes in the KV cache on top: it is rounded up to blocks, and some are kept."""


def rollout(
    model: str = "7B",
    format: str = "nvfp4,bf16",
    variant: str = "stock,ours",
    rank: str = "32",
    batch: str = "1,2,8,64,256",
    prompt_length: int = 256,
    completion_length: int = 128,
    repeats: int = 3,
    budget_gb: float | None = None,
    memory_gb: float | None = None,
    output: Path | None = None,
    commit: str | None = None,
) -> None:
    """Tokens per second of vLLM with an adapter: stock settings, and the project's engine.

    Prompts are random and new in every repeat, so their prefill counts. At temperature 1, with log-probabilities.
    With ``budget_gb`` there is one more row, of an engine of its own: of the largest batch asked for with completions
    of 2,048 tokens, the sequences for which a card with so much memory has room are sampled at once.

    Args:
        model: shapes, separated by commas; all but tiny-test need a GPU.
        format: weight formats.
        variant: stock (vllm.LLM, the adapter from a file) and ours (the project's engine).
        rank: of the adapter; 0 is the base without LoRA.
        batch: completions sampled at the same time.
        prompt_length: tokens.
        completion_length: tokens.
        repeats: timed calls of each batch, after a short one.
        budget_gb: memory of the card for the row of long completions.
        memory_gb: memory of the GPU that may be used, as on a smaller card.
        output: JSON file to add the rows to.
        commit: of the code, where this is no git checkout.
    """
    batches, variants = numbers(batch), choices("variant", variant, VARIANTS)
    formats = choices("format", format, list(FORMATS))
    limit_memory(memory_gb)
    models = shapes(model)
    results = Results("rollout", output, commit)
    for name in models:
        for form in formats:
            for size in numbers(rank):
                for kind in variants:
                    what = {
                        "model": name, "format": form, "variant": kind, "rank": size, "memory_gb": memory_gb,
                        "prompt_length": prompt_length, "completion_length": completion_length,
                    }  # fmt: skip
                    with results.candidate(what):
                        spec = _spec(what, completion_length, max(batches))
                        _measure(results, what, spec, batches, repeats)
                    if budget_gb is not None:
                        what |= {"completion_length": LONG, "budget_gb": budget_gb}
                        with results.candidate(what):
                            fitting = _fitting(what, max(batches))
                            # So many tokens that one call is enough.
                            _measure(results, what, _spec(what, LONG, fitting), [fitting], 1)
    results.finish()


def _spec(what: dict[str, Any], completion_length: int, sequences: int) -> EngineSpec:
    length = what["prompt_length"] + completion_length
    return random_spec(what["model"], what["format"], what["rank"], length, sequences * (length + BLOCKS))


def _fitting(what: dict[str, Any], most: int) -> int:
    """How many sequences fit into the budget at once, at most ``most``; ValueError if not one does."""
    # vllm.LLM computes 16,384 prompt tokens at once on such a card, ours 8,192.
    batched_tokens = 16384 if what["variant"] == "stock" else 8192
    length = what["prompt_length"] + LONG
    found = sequences_within(_spec(what, LONG, 1), what["budget_gb"], length + BLOCKS, batched_tokens, most)
    if not found:
        raise ValueError(f"--budget_gb {what['budget_gb']}: not one sequence of {length} tokens fits beside the model")
    return found


def _measure(results: Results, what: dict[str, Any], spec: EngineSpec, batches: Sequence[int], repeats: int) -> None:
    """One engine, all batches."""
    tokens, vocabulary, draws = what["completion_length"], spec.config["vocab_size"], torch.Generator().manual_seed(0)
    free_memory()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        stock = what["variant"] == "stock"
        engine = Stock(spec, batches, Path(scratch)) if stock else Ours(spec, batches)
        started = time.perf_counter() - began

        def once(batch: int, tokens: int) -> int:
            prompts = torch.randint(2, vocabulary, (batch, what["prompt_length"]), generator=draws)
            return engine.generate(prompts.tolist(), tokens)

        try:
            for batch in batches:
                counts: list[int] = []

                def timed(batch: int = batch, counts: list[int] = counts) -> None:
                    counts.append(once(batch, tokens))

                once(batch, min(24, tokens))  # warms up all that a longer call runs
                times = seconds(timed, repeats, warm_up=0)
                rates = [count / time for count, time in zip(counts, times, strict=True)]
                measured = {
                    **spread("tokens_per_s", rates), **spread("milliseconds", [1e3 * t for t in times]),
                    "model_gb": engine.model_bytes() / 1e9, **peak(), "start_s": started, "repeats": repeats,
                    **({"notes": "; ".join(engine.notes)} if engine.notes else {}),  # kernels left out, and why
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
        self.notes = self.engine.notes
        if spec.targets:
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

    notes = ()

    def __init__(self, spec: EngineSpec, batches: Sequence[int], scratch: Path) -> None:
        from qerl_pl.engine.vllm_stock import StockVLLM

        adapter = write_adapter(spec, scratch) if spec.targets else None
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
