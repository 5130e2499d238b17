"""Finds at the start what would end or spoil a run later."""

import difflib
import fcntl
import os
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lightning import Callback, Trainer

from qerl_pl.callbacks.adapter import run_folder
from qerl_pl.evaluation import metric_names


class StartCheck(Callback):
    """Refuses a folder that cannot be written or that another run writes to, and a ``monitor`` that is never logged.

    What validation logs is known at the start, all else after the first rollout that teaches something.
    """

    _folder: int | None = None

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if stage != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folders = [getattr(checkpoint, "dirpath", None) for checkpoint in trainer.checkpoint_callbacks]
        for folder in filter(None, [run_folder(trainer), *folders]):
            check_writable(str(folder))
        if trainer.is_global_zero:
            self._folder = occupied(run_folder(trainer))
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        sets = data.sets("validation") if trainer.limit_val_batches else ()
        check_monitors(trainer, metric_names("validation", sets, data.eval_sampling.n), of_validation=True)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if "entropy" in trainer.callback_metrics:
            check_monitors(trainer, {*trainer.callback_metrics, "epoch", "step"}, of_validation=False)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None


def check_writable(folder: str) -> None:
    """ValueError unless a file can be made in the folder, or where it would be made; nothing is left there."""
    if "://" in folder:  # a bucket
        return
    place = Path(folder).absolute()
    there = next(path for path in (place, *place.parents) if os.path.exists(path))
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be written ({there}: {error.strerror}); give checkpoint.dirpath, or the save_dir of the "
            "logger, another folder"
        ) from error


def occupied(folder: Path) -> int | None:
    """A descriptor that holds the folder until it is closed, or its process ends; ValueError if another run holds it.

    Lightning numbers folders by those that are there: two runs that begin in the same second get the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(
            f"another run writes to {folder}; start this one again, or give it a place of its own: "
            "--trainer.logger.init_args.name NAME"
        ) from None
    except OSError:  # a file system that cannot tell
        os.close(descriptor)
        return None
    return descriptor


def check_monitors(trainer: Trainer, known: Collection[str], of_validation: bool) -> None:
    """ValueError if a checkpoint or an early stop waits for a metric that is not one of ``known``. With a callback of
    the user's there may be others.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if all(type(callback).__module__.startswith(("qerl_pl.", "lightning.")) for callback in callbacks):
        for name in [getattr(callback, "monitor", None) for callback in callbacks]:
            if name is not None and name not in known and name.startswith("validation/") == of_validation:
                meant = "".join(f"Did you mean {close!r}? " for close in difflib.get_close_matches(name, known, n=1))
                raise ValueError(f"monitor: {name!r} is never logged. {meant}docs/tensorboard.md has all metrics")
