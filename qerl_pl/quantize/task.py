"""The task of a report: ``qerl-pl test`` of both models, whose settings are checked before anything else is done."""

import argparse
import contextlib
import io
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any


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

    logged = logging.root.manager.disable
    logging.disable(logging.WARNING)  # of seeds and devices, as if it were run
    try:
        for name in ("base", "quantized"):
            Built(_words(given, base, name, "runs"))
    except (SystemExit, ValueError, ImportError, OSError, MisconfigurationException) as error:
        why = said.getvalue().strip().rpartition("\n")[2].removeprefix("qerl-pl: error: ")
        raise ValueError(f"--task {given.task}: {why if isinstance(error, SystemExit) else error}") from error
    finally:
        logging.disable(logged)


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
