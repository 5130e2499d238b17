"""What a run that goes on from a checkpoint is told before it starts."""

import zipfile
from pathlib import Path

from qerl_pl.run_settings import changes, run_settings, settings_of

KEPT = "model.optimizer."
"""Settings that a checkpoint brings along, in the state of the optimizer."""


def check_checkpoint(path: Path) -> None:
    """ValueError unless the file is a complete archive of PyTorch's; Lightning's own errors name no file."""
    if path.is_dir():
        raise ValueError(f"ckpt_path: {path} is a folder; name a checkpoint in it, such as last.ckpt")
    if path.is_file() and not zipfile.is_zipfile(path):
        raise ValueError(f"ckpt_path: {path} is no checkpoint, or an incomplete one")


def changed_settings(checkpoint: Path, settings: str) -> list[str]:
    """A line for each setting that differs from those of the run that wrote the checkpoint; none if they are not there.

    settings: YAML of the new run; the old run's is ``config.yaml`` above the folder of the checkpoint.
    """
    before = run_settings(checkpoint.resolve().parent.parent)
    if not before:
        return []
    lines = []
    for name, old, new in changes(before, settings_of(settings)):
        kept = "; the checkpoint's goes on" if name.startswith(KEPT) else ""
        lines.append(f"{name}: {old} in the run that it goes on from, {new} now{kept}")
    return lines
