"""The settings of runs that were made before, from the ``config.yaml`` in their folders."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

UNIMPORTANT = ("ckpt_path", "config")


def settings_of(text: str) -> dict[str, Any]:
    """Of a run's YAML: the name of each setting, as on the command line, and its value."""
    return dict(_leaves(yaml.safe_load(text) or {}))


def run_settings(folder: Path) -> dict[str, Any]:
    """Of the run of ours that wrote to the folder; empty if that is not known."""
    try:
        found = settings_of((folder / "config.yaml").read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError):  # none, or no settings
        return {}
    return found if {name.partition(".")[0] for name in found} >= {"model", "data"} else {}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, before, now) of what is not the same in both; None where one of them lacks it."""
    pairs = [(name, before.get(name), now.get(name)) for name in dict.fromkeys([*before, *now])]
    return [(name, old, new) for name, old, new in pairs if old != new and not name.startswith(UNIMPORTANT)]


def _leaves(settings: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in settings.items():
        found += _leaves(value, f"{above}{name}.") if isinstance(value, dict) and value else [(above + name, value)]
    return found
