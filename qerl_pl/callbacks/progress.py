"""A progress bar that says which phase a step is in."""

import re
import sys
import time
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

from qerl_pl.rollouts import say_notes


class PhaseProgressBar(TQDMProgressBar):
    """Shows the phase (rollout, reward, update), tokens/s while sampling, and the reward. Where the output is no
    terminal: a line a step.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = True) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=leave)
        self._told = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        trainer.datamodule.collector.report = self.report  # type: ignore[attr-defined]
        if not sys.stderr.isatty():
            self.disable()

    def report(self, phase: str, text: str) -> None:
        """Called by whatever the run is busy with."""
        if phase == "note":
            say_notes(phase, text)
        elif sys.stderr.isatty():
            bar = self._current_bar()
            if bar is not None:
                bar.set_description_str(f"{phase} {text}")
        elif time.monotonic() - self._told > 30:  # a sign of life in a log file
            self._told = time.monotonic()
            print(f"{phase} {text}", file=sys.stderr, flush=True)

    def _current_bar(self) -> Any:
        # No truth value of a bar is asked for: tqdm refuses that of one whose total is not known yet.
        name = "train" if self.trainer.training else "test" if self.trainer.testing else "val"
        return getattr(self, f"_{name}_progress_bar", None)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        logged = trainer.callback_metrics
        names = {"reward": "reward", "tokens_per_second/rollout": "tok/s"}
        return {short: f"{float(logged[name]):.4g}" for name, short in names.items() if name in logged}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if not sys.stderr.isatty():
            values = "  ".join(f"{k} {v}" for k, v in self.get_metrics(trainer, pl_module).items())
            self.say(f"rollout {batch.step + 1}/{pl_module.total_rollouts}  {values}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        found = {n: v for n, v in trainer.callback_metrics.items() if re.fullmatch(r"validation/(.*/)?pass@1", n)}
        if trainer.state.fn == "fit" and found:
            values = "  ".join(f"{name} {float(value):.4g}" for name, value in found.items())
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            self.say(f"after rollout {data.done}/{pl_module.total_rollouts}  {values}")

    def say(self, text: str) -> None:
        if sys.stderr.isatty():
            self.print(text)
        else:
            print(text, file=sys.stderr, flush=True)
