"""The task of a report: ``qerl-pl test`` of both models, whose settings are checked before anything else is done."""

import argparse
import contextlib
import io
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

ENVIRONMENT = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "CUBLAS_WORKSPACE_CONFIG")  # Lightning's, of seed and determinism


def _words(given: argparse.Namespace, base: Path, name: str, runs: str) -> list[str]:
    """What ``qerl-pl`` is told for one of the models, ``base`` or ``quantized``."""
    model, format_ = {"base": (base, "bf16"), "quantized": (given.report or given.output, given.format)}[name]
    chosen = ["--model.model", str(model.absolute()), "--model.quantization", format_, "--adapter", "none"]
    if name == "quantized" and given.group_size is not None:
        chosen += ["--model.quantization.group_size", str(given.group_size)]
    return ["test", "--config", str(given.task), *chosen, "--trainer.logger.save_dir", runs]


def check_task(given: argparse.Namespace, base: Path) -> None:
    """ValueError if ``qerl-pl test`` would refuse settings, components or problems of the task; no model is read."""
    if not given.task.is_file():
        raise ValueError(f"--task {given.task}: there is no such file; name a config of qerl-pl test")
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from qerl_pl.lightning_cli import QeRLCLI

    said = io.StringIO()

    class Built(QeRLCLI):
        """``qerl-pl test`` up to its run."""

        def parse_arguments(self, *args: Any) -> None:
            with contextlib.redirect_stderr(said):
                super().parse_arguments(*args)

        def _run_subcommand(self, subcommand: str) -> None:
            data = self.datamodule
            for source in data.evaluated("test").values():
                len(source)  # reads it
            assert data.correctness

    try:
        with _as_it_was():
            for name in ("base", "quantized"):
                Built(_words(given, base, name, "runs"))
    except (SystemExit, ValueError, ImportError, OSError, MisconfigurationException) as error:
        why = said.getvalue().strip().rpartition("\n")[2].removeprefix("qerl-pl: error: ")
        raise ValueError(f"--task {given.task}: {why if isinstance(error, SystemExit) else error}") from error


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Without the messages of a Trainer that is built, and what it sets for the whole process taken back after."""
    logged, deterministic = logging.root.manager.disable, torch.are_deterministic_algorithms_enabled()
    environment = {name: os.environ.get(name) for name in ENVIRONMENT}
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logged)
        torch.use_deterministic_algorithms(deterministic)
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def run_task(given: argparse.Namespace, base: Path, results: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """pass@1 of both, paired; what ``qerl-pl test`` wrote goes to ``results/{base,quantized}.json``."""
    from qerl_pl.comparison import compare, read

    for name in ("base", "quantized"):
        say(f"report: {given.task} with the {name} model")
        with tempfile.TemporaryDirectory() as runs:
            command = [sys.executable, "-m", "qerl_pl", *_words(given, base, name, runs)]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            found = list(Path(runs).rglob("results/test.json"))
            if done.returncode or len(found) != 1:
                lines = done.stdout.strip().splitlines()
                raise ValueError(f"--task {given.task}: qerl-pl test failed: {lines[-1] if lines else done.returncode}")
            shutil.copy(found[0], results / f"{name}.json")
    first, second = (read(results / f"{name}.json") for name in ("base", "quantized"))
    return {name: asdict(difference) for name, difference in compare(first, second).items()}
