"""What the policy writes, for people."""

import html
import json
import math
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from qerl_pl.callbacks.adapter import run_folder
from qerl_pl.types import RolloutBatch


class CompletionsTable(Callback):
    """Appends every completion to ``completions.jsonl`` in the run's folder, and shows some in TensorBoard.

    A line has step (TensorBoard's: the first is 0), prompt, completion, finished, reward, rewards (by name; null where
    one abstained), advantage and the data columns. In ``completions-validation.jsonl`` and ``completions-test.jsonl``
    it has ``rollouts`` and no step: so many that were learnt from before, one more than TensorBoard's step.

    Args:
        every: rollout batches between two that are written.
        samples: completions shown in TensorBoard, of each batch written; of different prompts.
    """

    def __init__(self, every: int = 1, samples: int = 4) -> None:
        if every < 1 or samples < 0:
            raise ValueError(f"completions: every {every} must be at least 1 and samples {samples} at least 0")
        self.every, self.samples = every, samples

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        if batch.step % self.every == 0:
            self._write(trainer, batch, "train")

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: RolloutBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._write(trainer, batch, "validation")

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: RolloutBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._write(trainer, batch, "test")

    def _write(self, trainer: Trainer, batch: RolloutBatch, split: str) -> None:
        if trainer.sanity_checking or trainer.fast_dev_run or not trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        rows = table(batch)
        when = {"step": batch.step} if split == "train" else {"rollouts": trainer.datamodule.done}  # type: ignore[attr-defined]
        path = run_folder(trainer) / ("completions.jsonl" if split == "train" else f"completions-{split}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(json.dumps(when | row, ensure_ascii=False, default=str) + "\n" for row in rows)
        if split == "train" and self.samples and isinstance(trainer.logger, TensorBoardLogger):
            shown = "\n\n".join(_markdown(row) for row in rows[:: max(1, len(rows) // self.samples)][: self.samples])
            trainer.logger.experiment.add_text("completions", shown, global_step=batch.step)


def table(batch: RolloutBatch) -> list[dict[str, Any]]:
    """One row a completion."""
    rewards, advantages = batch.rewards.tolist(), batch.advantages.tolist()
    parts = {name: values.tolist() for name, values in batch.reward_parts.items()}
    return [
        {
            "prompt": prompt.text,
            "completion": completion.text,
            "finished": completion.finished,
            "reward": _number(rewards[i]),
            "rewards": {name: _number(values[i]) for name, values in parts.items()},
            "advantage": _number(advantages[i]),
            **{f"data/{key}": value for key, value in prompt.columns.items()},
        }
        for i, (prompt, completion) in enumerate(zip(batch.prompts, batch.completions, strict=True))
    ]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 6)


def _markdown(row: dict[str, Any]) -> str:
    """A quotation: unlike a code block it wraps long lines."""
    prompt, completion = (html.escape(row[key]).replace("\n", "\n> ") for key in ("prompt", "completion"))
    return f"**reward {row['reward']}**, advantage {row['advantage']:+.2f}\n\n> {prompt}\n>\n> **⟶** {completion}"
