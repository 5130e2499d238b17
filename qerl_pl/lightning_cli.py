"""The LightningCLI behind ``qerl-pl fit|validate|test``."""

import contextlib
import logging
import os
import re
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile, Namespace  # type: ignore[attr-defined]
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from qerl_pl.callbacks import (
    AdapterFolder,
    CompletionsTable,
    EvaluationResults,
    OneScreen,
    PhaseProgressBar,
    StartCheck,
)
from qerl_pl.callbacks.results import NO_ADAPTER
from qerl_pl.datamodule import RolloutDataModule
from qerl_pl.module import QeRLModule
from qerl_pl.parser import REGISTRIES, Parser, refusal
from qerl_pl.peft_folder import adapter_settings
from qerl_pl.resumed import changed_settings, check_checkpoint

QUIET = (
    r"Found \d+ module\(s\) in eval mode",  # the frozen base
    r"isinstance\(treespec, LeafSpec\)",  # Lightning 2.6 with torch 2.13
    r"LightningCLI's args parameter",  # demo and benchmarks give them
    r"litlogger",
    r"sync_dist=True",  # vLLM makes a process group of one
    r"Using ModelCheckpoint with manual optimization",
    r"set_float32_matmul_precision",
    r"configure_callbacks.*override existing",  # a second fit or test in the process
    r"weights_only` was not set",
    r"Total length of `list` across ranks is zero",  # no validation set
    r"your dataloader is not resumable",  # it is: RolloutDataModule keeps the place in the stream of prompts
    r"The dirpath has changed from",  # always: a resumed run has a folder of its own, and best checkpoints of its own
    r"deprecated in v4\.4\d\.0",  # jsonargparse, of what Lightning 2.6 calls
)
"""What libraries say that a user can do nothing about."""


def _quiet() -> None:
    for message in QUIET:
        warnings.filterwarnings("ignore", f"(?s).*{message}")
    said = re.compile("|".join(QUIET))
    for name in (
        "lightning.pytorch.utilities.rank_zero",
        "lightning.pytorch.trainer.connectors.checkpoint_connector",
        "lightning.pytorch.trainer.connectors.logger_connector.logger_connector",
    ):
        logging.getLogger(name).addFilter(lambda record: not said.search(record.getMessage()))


def newest_checkpoint(config: Any) -> Path:
    """The ``last.ckpt`` written last by runs with these settings. Lightning looks only in the new run's own folder."""
    logger = config.trainer.logger
    places = config.trainer.default_root_dir or "."
    if config.checkpoint.dirpath is not None:
        found, places = [Path(config.checkpoint.dirpath) / "last.ckpt"], config.checkpoint.dirpath
    elif isinstance(logger, Namespace):
        places = str(Path(logger.init_args.save_dir) / (logger.init_args.get("name") or ""))
        found = list(Path(places).glob("**/checkpoints/last.ckpt"))
    else:
        found = list(Path(places).glob("**/checkpoints/last.ckpt"))
    found = [path for path in found if path.is_file()]
    if not found:
        raise ValueError(f"ckpt_path: last, but there is no last.ckpt below {places}; give the path of a checkpoint")
    return max(found, key=lambda path: path.stat().st_mtime_ns)


def nothing_but_config(folder: Path) -> list[Path]:
    """The files of a run of this process that wrote only what is written before anything happens: settings, and a log
    without steps. Empty if there is anything else, or another process's log: it may have been given the same place.
    Each process begins its log before it writes settings, so those without a foreign log are of this one. (CSVLogger
    writes no file before the first steps: whose its folder is cannot be told, so it stays.)
    """
    files = list(folder.iterdir()) if folder.is_dir() else []
    log = re.compile(rf"events\.out\.tfevents\.\d+\.{re.escape(socket.gethostname())}\.{os.getpid()}\.\d+")
    logs = [file for file in files if log.fullmatch(file.name)]
    others = {file.name for file in files} - {file.name for file in logs}
    return files if logs and others <= {"config.yaml", "hparams.yaml"} else []


class QeRLCLI(LightningCLI):
    """``model``, ``data`` and ``trainer`` from YAML and the command line; plugins are loaded first."""

    def __init__(self, args: list[str] | None = None, run: bool = True) -> None:
        _quiet()
        for registry in REGISTRIES:
            registry.load_plugins()
        super().__init__(
            QeRLModule,
            RolloutDataModule,
            args=args,
            run=run,
            seed_everything_default=0,
            save_config_kwargs={"overwrite": True},
            auto_configure_optimizers=False,
            parser_kwargs={"description": "Quantization-enhanced reinforcement learning on PyTorch Lightning."},
            trainer_defaults={
                "callbacks": [
                    StartCheck(),
                    PhaseProgressBar(),
                    OneScreen(),
                    AdapterFolder(),
                    EvaluationResults(),
                ],
                "logger": {
                    "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
                    "init_args": {"save_dir": "runs", "name": "qerl"},
                },
                "max_epochs": 1,
                "devices": 1,
                "log_every_n_steps": 1,
                "val_check_interval": 50,
                "check_val_every_n_epoch": None,  # the interval counts rollout batches of the whole run
                "num_sanity_val_steps": 0,
                "enable_model_summary": False,
            },
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        parser = Parser(**kwargs)
        parser.add_argument(
            "-c", "--config", action=ActionConfigFile, help="YAML file with settings; may be given several times."
        )
        return parser

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        commands = LightningCLI.subcommands()
        return {name: commands[name] for name in ("fit", "validate", "test")}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.add_lightning_class_args(CompletionsTable, "completions")
        parser.set_defaults(
            {"checkpoint.save_last": True, "checkpoint.every_n_train_steps": 50, "checkpoint.filename": "step-{step}"}
        )
        parser.link_arguments("seed_everything", "model.seed")
        parser.link_arguments("seed_everything", "data.seed")

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand != "fit":
            parser.add_argument(
                "--adapter", type=str | None, default=None,
                help="PEFT folder to evaluate instead of a checkpoint; none: the base alone.",
            )  # fmt: skip
            parser.add_argument(
                "--evaluate_base", type=bool, default=False,
                help="Evaluate the base too, with the same seeds, and report the paired difference.",
            )  # fmt: skip
        return parser

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:
            if (said := refusal(str(error))) is None:
                raise
            raise ValueError(said) from error

    def _run_subcommand(self, subcommand: str) -> None:
        """A run that fails before anything but settings is written leaves no folder. One that is resumed keeps its own:
        it has saved the adapter that it began with.
        """
        named = getattr(self.trainer.logger, "log_dir", None) if self.trainer.is_global_zero else None
        new = Path(named) if named is not None and not Path(named).exists() else None
        try:
            super()._run_subcommand(subcommand)
        except Exception:
            if new is not None and self.trainer.global_step == 0 and (files := nothing_but_config(new)):
                with contextlib.suppress(OSError):  # something has appeared there: it stays
                    for file in files:
                        file.unlink()
                    new.rmdir()
            raise

    def _parse_ckpt_path(self) -> None:
        """Nothing: Lightning's reads hyperparameters, of which a checkpoint holds none, before it can be checked."""

    def before_instantiate_classes(self) -> None:
        config = self.config if self.subcommand is None else self.config[self.subcommand]
        if (adapter := config.get("adapter")) is not None:
            if config.get("ckpt_path") is not None:
                raise ValueError(f"adapter: {adapter} and ckpt_path: {config.ckpt_path}; give one of the two")
            if adapter != NO_ADAPTER:
                for name, value in adapter_settings(Path(adapter)).items():
                    config.model.lora[name] = value
        for callback in self.trainer_defaults["callbacks"]:
            if isinstance(callback, EvaluationResults):
                callback.adapter, callback.base = adapter, bool(config.get("evaluate_base"))
        if config.get("ckpt_path") == "last":
            config.ckpt_path = str(newest_checkpoint(config))
        if (path := config.get("ckpt_path")) is not None:
            check_checkpoint(Path(path))
            if self.subcommand == "fit" and os.environ.get("LOCAL_RANK", "0") == "0":
                settings = self._parser("fit").dump(config, skip_none=False, skip_validation=True)
                for line in changed_settings(Path(path), settings):
                    print(f"qerl-pl: {line}", file=sys.stderr)
        if config.trainer.val_check_interval == 0:
            raise ValueError("trainer.val_check_interval: 0; for no validation give --data.validation null")
        if config.trainer.enable_progress_bar is False:
            self.trainer_defaults["callbacks"] = [
                c for c in self.trainer_defaults["callbacks"] if not isinstance(c, PhaseProgressBar)
            ]
