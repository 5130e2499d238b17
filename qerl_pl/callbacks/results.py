"""Results of ``qerl-pl validate`` and ``test``: the policy to evaluate, the base beside it, JSON, table and plot."""

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer

from qerl_pl import __version__
from qerl_pl.callbacks.adapter import run_folder
from qerl_pl.callbacks.sync import deliver
from qerl_pl.evaluation import Grades, report
from qerl_pl.evaluation_plot import draw
from qerl_pl.evaluation_table import table
from qerl_pl.peft_folder import adapter_tensors, other_base
from qerl_pl.rollouts import say_notes
from registry.prompts import PROMPTS, PromptSource

NO_ADAPTER = "none"


class EvaluationResults(Callback):
    """Writes ``results/test.json`` (or ``validate.json``) and a plot into the run's folder, and prints a table.
    A fast_dev_run only prints.

    Args:
        adapter: PEFT folder to evaluate instead of a checkpoint; ``none`` for the base alone.
        base: evaluate the base too, with the same seeds, and report the paired difference.
        quiet: only write.
    """

    def __init__(self, adapter: str | None = None, base: bool = False, quiet: bool = False) -> None:
        self.adapter, self.base, self.quiet = adapter, base, quiet

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "validate":
            self._load(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._load(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "validate":
            self._report(trainer, pl_module, "validation", "validate", trainer.num_val_batches)

    def on_test_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._report(trainer, pl_module, "test", "test", trainer.num_test_batches)

    def _load(self, trainer: Trainer, pl_module: Any) -> None:
        if self.adapter is None:
            return
        folder = None if self.adapter == NO_ADAPTER else Path(self.adapter)
        if folder and trainer.is_global_zero and (note := other_base(folder, pl_module.model)):
            say_notes("note", note)
        pl_module.load_state_dict(adapter_tensors(folder) if folder else _zeros(pl_module))
        deliver(trainer, pl_module)  # whether or not the callback that syncs has had its turn

    def _report(self, trainer: Trainer, pl_module: Any, split: str, name: str, batches: Any) -> None:
        policy = pl_module.grades
        if not policy.sets:
            return
        base = evaluate_base(trainer, pl_module, split, int(sum(batches))).gathered() if self.base else None
        if not trainer.is_global_zero:
            return
        result = report(split, self._settings(trainer, pl_module, split), policy, base)
        said = ["", table(result)]
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]  # one batch would replace what the whole set gave
            said += ["", *_written(result, run_folder(trainer) / "results" / f"{name}.json")]
        if not self.quiet:
            print("\n".join(said), flush=True)

    def _settings(self, trainer: Trainer, pl_module: Any, split: str) -> dict[str, Any]:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        sampling = data.eval_sampling
        untrained = not any(p.any() for n, p in pl_module.policy.adapter_parameters().items() if "lora_B" in n)
        if self.adapter not in (None, NO_ADAPTER):
            policy = f"adapter {Path(self.adapter).absolute()}"
        elif untrained:  # also where a checkpoint or an adapter was forgotten
            policy = "base alone"
        else:
            checkpoint = trainer.ckpt_path
            policy = f"checkpoint {Path(checkpoint).absolute()}" if checkpoint else f"after {data.done} rollout batches"
        return {
            "policy": policy,
            "model": pl_module.model,
            "quantization": type(pl_module.quantization).__name__,
            "engine": type(data.engine).__name__,
            "answer_format": type(data.collector.answer_format).__name__,
            "correctness": data.correctness,
            "samples": sampling.n,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "seed": data.seed,
            "sources": {name or split: _describe(source) for name, source in data.sets(split).items()},
            "version": __version__,
        }


def _written(result: dict[str, Any], path: Path) -> list[str]:
    """Write JSON and plot; where they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    try:
        draw(result, path.with_suffix(".png"))
    except ImportError as error:
        return [str(path), f"no plot: {error}"]
    return [str(path), str(path.with_suffix(".png"))]


def evaluate_base(trainer: Trainer, pl_module: Any, split: str, batches: int) -> Grades:
    """The same problems with the same seeds, sampled without adapter; afterwards the engine has the policy's again."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    grades = Grades()
    data.engine.load_adapter(_zeros(pl_module))
    data.engine.refresh()
    try:
        for batch in islice(data.evaluation(split), batches):
            grades.add(batch, data.correctness, data.collector.answer_format)
    finally:
        deliver(trainer, pl_module)
    return grades


def _zeros(pl_module: Any) -> Mapping[str, torch.Tensor]:
    return {name: torch.zeros_like(p) for name, p in pl_module.policy.adapter_parameters().items()}


def _describe(source: PromptSource) -> Any:
    try:
        return json.loads(json.dumps(PROMPTS.write(source)))
    except (AttributeError, TypeError, ValueError):  # a class of the user's, which need not keep what it was given
        return {"class_path": f"{type(source).__module__}.{type(source).__qualname__}"}
