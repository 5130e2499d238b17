"""Two processes train as one: the same completions, and the same adapter up to the order of sums."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qerl_pl.distributed import Replicas
from qerl_pl.losses import Loss
from qerl_pl.module import QeRLModule

ROOT = Path(__file__).parents[1]
ARGUMENTS = [
    "--config", "configs/tiny.yaml", "--trainer.accelerator", "cpu", "--trainer.max_steps", "3",
    "--data.prompts_per_batch", "4", "--data.num_generations", "4", "--data.train.size", "64",
    "--data.max_completion_length", "16", "--data.validation.size", "7", "--data.eval_batch", "3",
    "--trainer.val_check_interval", "1",
    "--trainer.enable_progress_bar", "false", "--model.loss.loss_type", "grpo", "--model.loss.num_iterations", "2",
    "--model.loss.beta", "0.05", "--model.tokens_per_micro_batch", "300", "--model.max_grad_norm", "100",
    # Not Adam: it would hide a gradient of the wrong size.
    "--model.optimizer", '{"class_path": "torch.optim.SGD", "init_args": {"lr": 1.0}}',
]  # fmt: skip

REPLICAS = ["--trainer.devices", "2", "--trainer.strategy", "replicas"]


def fit(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qerl_pl", "fit", *ARGUMENTS, "--trainer.logger.save_dir", str(folder), *more]
    environment = {k: v for k, v in os.environ.items() if k != "RANK"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def graded(folder: Path) -> dict[str, float]:
    """The last validation; its interval tells the number of problems."""
    accumulator = EventAccumulator(str(next(folder.rglob("events.out*")))).Reload()
    return {n: accumulator.Scalars(f"validation/{n}")[-1].value for n in ("pass@1", "pass@1_low", "pass@1_high")}


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next(folder.rglob("adapter_model.safetensors")))


def test_two_processes_are_one(tmp_path: Path) -> None:
    for name, more in (("one", []), ("two", REPLICAS)):
        done = fit(tmp_path / name, *more)
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = adapter(tmp_path / "one"), adapter(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert float((two[name] - tensor).norm() / tensor.norm().clamp(min=1e-9)) < 1e-4, name
    # Each evaluated its half of the problems, in turn.
    assert graded(tmp_path / "one") == graded(tmp_path / "two")


def test_what_is_refused() -> None:
    def check(strategy: Any, loss: Loss, rounds: int = 1) -> None:
        module = QeRLModule(loss=loss)
        data = SimpleNamespace(max_sampling_rounds=rounds, sets=lambda split: {})
        module._trainer = SimpleNamespace(world_size=2, strategy=strategy, datamodule=data, precision="32-true")
        module.setup("fit")

    replicas = Replicas()
    check(replicas, Loss())
    with pytest.raises(ValueError, match=r"2 processes need trainer\.strategy: replicas"):
        check(SingleDeviceStrategy(), Loss())
    with pytest.raises(ValueError, match="top_entropy_quantile and max_sampling_rounds must be 1"):
        check(replicas, Loss(top_entropy_quantile=0.5))
    with pytest.raises(ValueError, match="top_entropy_quantile and max_sampling_rounds must be 1"):
        check(replicas, Loss(), rounds=2)
