"""Keeps a PEFT folder of the latest adapter beside the checkpoints."""

from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer


class AdapterFolder(Callback):
    """Writes ``adapter/`` in the run's folder with every checkpoint, at the end, and when the run is interrupted."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._save(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """``last.ckpt`` of the state as it is, so that ``--ckpt_path last`` goes on after the last finished update."""
        if (
            trainer.state.fn == "fit"
            and getattr(pl_module, "policy", None) is not None
            and trainer.checkpoint_callback is not None
        ):
            folder = Path(trainer.checkpoint_callback.dirpath or run_folder(trainer) / "checkpoints")  # type: ignore[attr-defined]
            trainer.save_checkpoint(folder / "last.ckpt")

    def _save(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            pl_module.save_adapter(run_folder(trainer) / "adapter")  # type: ignore[operator]


def run_folder(trainer: Trainer) -> Path:
    """Where a run writes: the logger's folder, or the trainer's root."""
    return Path(trainer.log_dir or trainer.default_root_dir)
