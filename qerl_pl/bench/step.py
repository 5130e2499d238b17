"""Whole steps of ``fit``: rollout, rewards, update, sync."""

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from shlex import split
from typing import Any

from qerl_pl.bench.log import series
from qerl_pl.bench.results import Results, choices, free_memory, limit_memory, spread
from qerl_pl.bench.spec import shapes
from qerl_pl.random_model import PREFIX
from registry.quantization import FORMATS


def step(
    model: str = "7B",
    format: str = "nvfp4",
    config: Path | None = None,
    prompts: int = 4,
    generations: int = 8,
    prompt_length: int = 1024,
    completion_length: int = 4096,
    steps: int = 3,
    rank: int = 32,
    options: str = "",
    memory_gb: float | None = None,
    output: Path | None = None,
    commit: str | None = None,
) -> None:
    """Whole steps of `fit` by phase, with peak memory; the first is left out unless it is the only one.

    Prompts are arithmetic problems, and rewards made up so that every group has some to learn from: a model of random
    weights answers nothing, and nearly never ends a completion, so all have their full length.

    Args:
        model: shapes, separated by commas; all but tiny-test need a GPU.
        format: weight formats.
        config: of ``fit``; what is given here overrides it.
        prompts: of a rollout batch.
        generations: completions of a prompt.
        prompt_length: that the engine must have room for; arithmetic problems are shorter.
        completion_length: of each completion.
        steps: rollout batches.
        rank: of the adapter.
        options: further ones of ``fit``, as in "--data.engine vllm --model.tokens_per_micro_batch 8192".
        memory_gb: memory of the GPU that PyTorch may use, as on a smaller card.
        output: JSON file to add the rows to.
        commit: of the code, where this is no git checkout.
    """
    if steps < 1:
        raise ValueError(f"--steps: {steps} must be at least 1")
    formats = choices("format", format, list(FORMATS))
    limit_memory(memory_gb)
    models = shapes(model)
    results = Results("step", output, commit)
    for name in models:
        for form in formats:
            what = {
                "model": name, "format": form, "rank": rank, "prompts": prompts, "generations": generations,
                "prompt_length": prompt_length, "completion_length": completion_length,
                "config": config and config.name, "options": options or None, "memory_gb": memory_gb,
            }  # fmt: skip
            with results.candidate(what), tempfile.TemporaryDirectory() as folder:
                arguments = ([] if config is None else ["--config", str(config)]) + _overrides(what, steps, folder)
                _report(results, what, _run([*arguments, *split(options)]))
    results.finish()


def _overrides(what: dict[str, Any], steps: int, folder: str) -> list[str]:
    problems = {"class_path": "arithmetic", "init_args": {"split": "train", "size": max(64, what["prompts"] * steps)}}
    reward = {"class_path": "python", "init_args": {"function": f"{__name__}.spread_out"}}
    settings: dict[str, Any] = {
        "model.model": PREFIX + what["model"], "model.quantization": what["format"], "model.lora.rank": what["rank"],
        "data.train": json.dumps(problems), "data.validation": "null", "data.test": "null",
        "data.rewards": json.dumps(["gsm8k", reward]),
        "data.prompts_per_batch": what["prompts"], "data.num_generations": what["generations"],
        "data.max_prompt_length": what["prompt_length"], "data.max_completion_length": what["completion_length"],
        "trainer.max_epochs": 1, "trainer.max_steps": -1, "trainer.limit_train_batches": steps,
        "trainer.limit_val_batches": 0, "trainer.enable_progress_bar": "false", "trainer.logger": "TensorBoardLogger",
        "trainer.logger.save_dir": folder,
    }  # fmt: skip
    if what["memory_gb"] is not None:
        settings["model.memory_gb"] = what["memory_gb"]
    return [f"--{key}={value}" for key, value in settings.items()]


def spread_out(completions: Sequence[str]) -> list[float]:
    """A reward that differs within every group, so that no completion is skipped in the update."""
    return [i * 0.618 % 1.0 for i in range(len(completions))]


def _run(arguments: list[str]) -> dict[str, list[float]]:
    """Every logged series of a run of ``fit``."""
    from qerl_pl.lightning_cli import QeRLCLI

    given, sys.argv = sys.argv, sys.argv[:1]  # Lightning's parser would read them too
    try:
        cli = QeRLCLI(args=arguments, run=False)
    finally:
        sys.argv = given
    free_memory()
    try:
        cli.trainer.fit(cli.model, cli.datamodule)
    finally:
        cli.datamodule.engine.close()
    return {name: [value for _, value in points] for name, points in series(str(cli.trainer.log_dir)).items()}


def _report(results: Results, what: dict[str, Any], series: dict[str, list[float]]) -> None:
    """A row for each phase, and one for the whole step, which has the memory too."""
    times = {name.partition("/")[2]: values for name, values in series.items() if name.startswith("step_time/")}
    times["step"] = [sum(values) for values in zip(*times.values(), strict=True)]
    memory = {f"{name.partition('/')[2]}": max(values) for name, values in series.items() if name.startswith("memory/")}
    for phase, values in times.items():
        later = values[1:] or values
        measured: dict[str, Any] = spread("milliseconds", [1e3 * value for value in later]) | {"steps": len(later)}
        if phase in ("rollout", "update"):
            rate = series[f"tokens_per_second/{phase}"]
            measured["tokens_per_s"] = statistics.median(rate[1:] or rate)
        elif phase == "step":
            measured |= memory
        results.add(what | {"phase": phase}, measured)
