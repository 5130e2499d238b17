"""Finds at the start what would end or spoil a run later."""

import fcntl
import os
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lightning import Callback, Trainer

from qerl_pl.callbacks.adapter import run_folder
from qerl_pl.evaluation import metric_names
from registry._meant import meant


class StartCheck(Callback):
    """Refuses a folder that cannot be written or that another run writes to, and a ``monitor`` that is never logged.

    What validation logs is known at the start, all else after the first rollout that teaches something.
    """

    _held: tuple[int, ...] = ()

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # writes nothing
            return
        folders = [run_folder(trainer)]
        if stage == "fit":
            folders += [Path(place) for c in trainer.checkpoint_callbacks if (place := getattr(c, "dirpath", None))]
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            sets = data.sets("validation") if trainer.limit_val_batches else ()
            check_monitors(trainer, metric_names("validation", sets, data.eval_sampling.n), of_validation=True)
        refused = None
        if trainer.is_global_zero:
            try:
                self._hold([folder for folder in dict.fromkeys(folders) if ":/" not in str(folder)])  # no buckets
            except ValueError as error:
                refused = str(error)
        if refused := trainer.strategy.broadcast(refused):  # the other processes would wait for the first
            place = "--trainer.logger.init_args.name NAME" if trainer.loggers else "--trainer.default_root_dir FOLDER"
            raise ValueError(f"{refused}; give it another: {place}, or checkpoint.dirpath where that is meant")

    def _hold(self, folders: list[Path]) -> None:
        for folder in folders:
            check_writable(folder)
        for folder in folders:
            self._held += occupied(folder)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if "entropy" in trainer.callback_metrics:
            check_monitors(trainer, {*trainer.callback_metrics, "epoch", "step"}, of_validation=False)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")  # Lightning does not call it then

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        for descriptor in self._held:
            os.close(descriptor)
        self._held = ()


def check_writable(folder: Path) -> None:
    """ValueError unless a file can be made in the folder, or where it would be made; nothing is left there."""
    place = folder.absolute()
    there = next(path for path in (place, *place.parents) if os.path.exists(path))
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({there}: {error.strerror})") from error


def occupied(folder: Path) -> tuple[int, ...]:
    """Descriptors that hold the folder until they are closed, or the process ends; ValueError if another holds it.

    Lightning numbers folders by those that are there: two runs that begin in the same second get the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise ValueError(f"another run writes to {folder}: begin this one when it has ended") from None
        return ()  # a file system that knows no locks
    return (descriptor,)


def check_monitors(trainer: Trainer, known: Collection[str], of_validation: bool) -> None:
    """ValueError if a checkpoint or an early stop waits for a metric that is not one of ``known``. With a callback of
    the user's there may be others.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if all(type(callback).__module__.startswith(("qerl_pl.", "lightning.")) for callback in callbacks):
        for name in [getattr(callback, "monitor", None) for callback in callbacks]:
            if name is not None and name not in known and name.startswith("validation/") == of_validation:
                raise ValueError(
                    f"monitor: {name!r} is never logged, or for TensorBoard alone.{meant(name, known)} "
                    "docs/tensorboard.md has all metrics"
                )
