"""What a run that goes on from a checkpoint is told before it starts."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

KEPT = "model.optimizer."
"""Settings that a checkpoint brings along, in the state of the optimizer."""
UNIMPORTANT = ("ckpt_path", "config")


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
    file = checkpoint.resolve().parent.parent / "config.yaml"
    if not file.is_file():
        return []
    before, now = (dict(_leaves(yaml.safe_load(text) or {})) for text in (file.read_text(), settings))
    lines = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if old != new and not name.startswith(UNIMPORTANT):
            kept = "; the checkpoint's goes on" if name.startswith(KEPT) else ""
            lines.append(f"{name}: {old} in the run that it goes on from, {new} now{kept}")
    return lines


def _leaves(settings: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in settings.items():
        found += _leaves(value, f"{above}{name}.") if isinstance(value, dict) and value else [(above + name, value)]
    return found
