"""Keeps a PEFT folder of the latest adapter beside the checkpoints."""

from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only

from qerl_pl.callbacks.said import beginning, card, command
from qerl_pl.rollouts import say_notes


class AdapterFolder(Callback):
    """Writes ``adapter/`` in the run's folder with every checkpoint, at the end, and when the run is interrupted."""

    _training = False

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._save(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._training = True  # before this, the state of a checkpoint to go on from is not in place
        updates: int = pl_module.updates_per_rollout  # type: ignore[assignment]
        for checkpoint in trainer.checkpoint_callbacks:
            if not isinstance(checkpoint, ModelCheckpoint):
                continue
            # Lightning saves where the count of updates, which a rollout raises by several, is a multiple
            checkpoint._every_n_train_steps = -(-checkpoint._every_n_train_steps // updates) * updates
            if checkpoint.CHECKPOINT_NAME_LAST == "last":  # also ours; Lightning would write last-v1 too
                checkpoint.last_model_path = checkpoint.format_checkpoint_name({}, "last")
                if trainer.fast_dev_run:  # type: ignore[attr-defined]  # Lightning saves at the end even then
                    checkpoint.save_last = False
        place = "nothing: fast_dev_run" if trainer.fast_dev_run else f"to {run_folder(trainer)}"  # type: ignore[attr-defined]
        _say(f"this run writes {place}\n{beginning(trainer, pl_module)}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save_last(trainer)
        adapter, last = run_folder(trainer) / "adapter", _last(trainer)
        if last is not None and last.exists():
            _say(f"adapter: {adapter} (a PEFT folder); test it: {command('test', adapter.parent, last)}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """``last.ckpt`` of the state as it is, so that ``--ckpt_path last`` goes on after the last finished rollout.

        Between the updates of one rollout batch the last checkpoint stays: going on from the middle would repeat some.
        """
        whole = trainer.global_step % pl_module.updates_per_rollout == 0  # type: ignore[operator]
        if whole and all(tensor.isfinite().all() for tensor in pl_module.state_dict().values()):
            try:
                self._save_last(trainer)
            except Exception as error:  # a full disk, maybe: what ends the run is to be told
                _say(f"the state at this point could not be saved: {error}")
        last = _last(trainer)
        if last is not None and last.exists():
            _say(f"stopped; go on from there: {command('fit', run_folder(trainer), last)}")

    def _save_last(self, trainer: Trainer) -> None:
        last = _last(trainer)
        if self._training and trainer.global_step > 0 and last is not None:
            trainer.save_checkpoint(last)
        self._training = False

    def _save(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            folder, last = run_folder(trainer) / "adapter", _last(trainer)
            pl_module.save_adapter(folder)  # type: ignore[operator]
            if last is not None:
                (folder / "README.md").write_text(card(trainer, pl_module, folder, last))


@rank_zero_only
def _say(text: str) -> None:
    say_notes("note", text)


def _last(trainer: Trainer) -> Path | None:
    """The checkpoint to go on from; None without checkpoints, of which a fast_dev_run writes none."""
    checkpoint = trainer.checkpoint_callback
    if checkpoint is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    return Path(checkpoint.dirpath or run_folder(trainer) / "checkpoints") / "last.ckpt"  # type: ignore[attr-defined]


def run_folder(trainer: Trainer) -> Path:
    """Where a run writes: the logger's folder, or the trainer's root.

    ``trainer.log_dir`` would wait for the other processes, but some of the callers are the first alone.
    """
    logger = trainer.logger
    return Path(getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None) or trainer.default_root_dir)
