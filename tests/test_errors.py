"""A stranger's session: each mistake is answered in one clear line."""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.cli import LightningCLI

from qerl_pl import lightning_cli
from qerl_pl.cli import COMMANDS, HELP, LIGHTNING, main
from qerl_pl.datamodule import RolloutDataModule
from qerl_pl.lightning_cli import QeRLCLI, nothing_but_config
from qerl_pl.module import QeRLModule
from registry.rewards import Reward

CONFIG = str(Path(__file__).parents[1] / "configs" / "tiny.yaml")


class Outer:
    class Inner(Reward):
        def __call__(self, prompts, completions, **columns):
            return [0.0 for _ in completions]


def answer(arguments, capsys, monkeypatch) -> str:
    monkeypatch.delenv("QERL_PL_DEBUG", raising=False)
    monkeypatch.setattr(sys, "argv", ["qerl-pl"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("qerl-pl: error:")]
    assert len(said) == 1
    return said[0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--model.noise", "exponental"],
            "model.noise: unknown noise schedule 'exponental'. Did you mean 'exponential'?",
        ),
        (
            ["--model.quantization", "nvpf4"],
            "unknown quantization format 'nvpf4'. Did you mean 'nvfp4'? Registered: bf16",
        ),
        (["--data.rewards", "[gsm9k]"], "unknown reward 'gsm9k'. Did you mean 'gsm8k'?"),
        (
            ["--data.test", "{class_path: arithmetic, init_args: {sizes: 3}}"],
            "data.test: Arithmetic: Option 'sizes' is not accepted. Did you mean 'size'?",
        ),
        (
            ["--data.test", "{a: {class_path: arithmetic, init_args: {sizes: 3}}}"],
            "data.test: Arithmetic: Option 'sizes' is not accepted. Did you mean 'size'?",
        ),
        (
            ["--data.test", "{a: arithmetic2}"],
            "data.test: unknown prompt source 'arithmetic2'. Did you mean 'arithmetic'?",
        ),
        (["--data.rewards", "gsm8k"], "error: data.rewards: gsm8k must be a list: [gsm8k]"),
        (
            ["--model.noise.sigma", "0.1"],
            "model.noise: Exponential: Option 'sigma' is not accepted. Did you mean 'sigma_end' or 'sigma_start'? "
            "It takes sigma_start, sigma_end, num_stages",
        ),
        (["--data.engine", "vlm"], "unknown engine 'vlm'. Did you mean 'vllm'?"),
        (["--lr", "0.1"], "unrecognized arguments: --lr 0.1. Did you mean 'model.optimizer.lr'?"),
        (["--group_size", "32"], "Did you mean 'model.quantization.group_size'?"),
        (["--max_step", "3"], "Did you mean 'trainer.max_steps'?"),
        *(
            (["--model.optimizer.lr", *rate], "error: model.optimizer.lr: Invalid learning rate: -0.001; give lr a num")
            for rate in (["-1e-3"], ["-0.001"])
        ),
        (["--model.optimizer.betas", "[0.9, 1.5]"], "error: model.optimizer.betas: Invalid beta parameter at index 1"),
        (["--model.warmup", "4"], "error: warmup: 4.0 is a share of the optimizer steps, from 0 to 1"),
        (["--trainer.val_check_interval", "0"], "val_check_interval: 0; for no validation give --data.validation null"),
        (["--ckpt_path", __file__], "test_errors.py is no checkpoint, or an incomplete one"),
        (["--ckpt_path", "configs"], "error: ckpt_path: configs is a folder; name a checkpoint in it"),
        (["--data.max_completion_length", "0"], "error: max_completion_length: 0 must be at least 1"),
        (["--data.rewards", "[format]"], "rewards: none of them checks correctness, so there is no pass@1"),
        (["--model.optimizer.lrr", "1"], "error: model.optimizer: AdamW: Option 'lrr' is not accepted. Did you mean"),
        (["--model.optimizer.lr", "abc"], "error: model.optimizer: lr: abc must be a number"),
        (["--model.optimizer.weight_decay", "x"], "error: model.optimizer: weight_decay: x must be a number"),
        (["--trainer.logger", "tensor"], "error: trainer.logger: tensor must be a component or a list or true"),
        (["--data.rewards", "null"], "error: data.rewards: None must be a list"),
        (["--data.chat_template_args", "x"], "error: data.chat_template_args: x must be a mapping or null"),
        (
            ["--data.rewards", "[{class_path: tests.test_errors.Outer.Inner, init_args: {fooo: 1}}]"],
            "error: data.rewards: Inner: Option 'fooo' is not accepted",
        ),
        (["--model.optimizer", "AdamX"], "optimizer: AdamX must be an import path, such as torch.optim.AdamW"),
        (["--model.lora.rnak", "8"], "--model.lora.rnak 8. Did you mean 'model.lora.rank'?"),
        (["--model.lora.rank", "eight"], "error: model.lora.rank: eight must be a whole number"),
        (["--model.lora", "{rank: eight}"], "error: model.lora.rank: eight must be a whole number"),
        (["--model", "{lora: {rank: eight}}"], "error: model.lora.rank: eight must be a whole number"),
        (["--model.memory_gb", "much"], "error: model.memory_gb: much must be a number or null"),
        (
            ["--model.gradient_checkpointing", "some"],
            "error: model.gradient_checkpointing: some must be true or false or a whole number or auto",
        ),
        (
            ["--model.quantization", "int4", "--model.quantization.group_size", "abc"],
            "error: model.quantization: Int4: group_size: abc must be a whole number or null",
        ),
        (
            ["--model.quantization", "int4", "--model.quantization.group_size", "0"],
            "error: quantization.group_size: 0 must be a positive multiple of 8, the codes of a word; give 32, 64",
        ),
        (
            ["--model.quantization", "int4", "--model.quantization.group_size", "7"],
            "error: quantization.group_size: 7 must be a positive multiple of 8, the codes of a word; give 32, 64",
        ),
        (["--model.noise.sigma_start", "-3"], "error: sigma_start must be a finite number of at least 0, got -3.0"),
        (
            ["--data.rewards", "[gsm8k, {class_path: python, init_args: {function: nowhere.f}}]"],
            "error: reward function 'nowhere.f' cannot be imported (No module named 'nowhere')",
        ),
        (
            ["--data.test", "{a: {class_path: file, init_args: {path: x, limit: 0}}}"],
            "error: limit must be at least 1, got 0; leave it out to read all rows",
        ),
        (
            ["--data.test", "{a: {class_path: arithmetic, init_args: {size: abc}}}"],
            "error: data.test: Arithmetic: size: abc must be a whole number",
        ),
        (["--model.model", "./nothere"], "there is no folder './nothere'"),
        (["--data.num_generations", "1"], "a group needs at least 2 completions"),
        (["--trainer.precision", "bf16-true"], "use 32-true, and model.dtype: bfloat16"),
        (["--ckpt_path", "last", "--trainer.logger.save_dir", "nowhere"], "there is no last.ckpt below nowhere"),
        (["--completions.every", "0"], "every 0 must be at least 1"),
        (["--data.train.size", "8"], "prompts_per_batch: 32 is more than the 8 training prompts"),
        (["--data.train", "file", "--data.train.path", "nowhere.jsonl"], "there is no file nowhere.jsonl"),
        (["--data.answer_format", "boxed", "--data.rewards", "[format]"], "none of them checks correctness"),
        (
            ["--checkpoint.dirpath", f"{CONFIG}/x"],
            f"/x cannot be written ({CONFIG}: Not a directory); give",
        ),
        (
            ["--checkpoint.monitor", "validation/pas@1"],
            "monitor: 'validation/pas@1' is never logged, or for TensorBoard alone. Did you mean 'validation/pass@1'?",
        ),
        (["--checkpoint.monitor", "validation/pass@1", "--data.validation", "null"], "'validation/pass@1' is never lo"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_one_line(arguments, expected, capsys, monkeypatch):
    assert expected in answer(["fit", "--config", CONFIG, *arguments], capsys, monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["fitt"], "unknown command 'fitt'. Did you mean 'fit'? Commands: fit, validate, test, compare, bench, "),
        (["verify", "nope.jsonl"], "error: No such file or directory: nope.jsonl"),
        (["fit", "--config", "nope.yaml"], "File does not exist: "),
        (
            ["fit", "--model.optimizer.lr", "1e-3"],
            "model.optimizer: its settings need a class; give --mod",
        ),
    ],
)
def test_commands_and_files(arguments, expected, capsys, monkeypatch):
    assert expected in answer(arguments, capsys, monkeypatch)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {los: {beta: 0.1}}", "'model.los.beta'. Did you mean 'model.loss.beta'?"),
        ("model: {noise: {class_path: exponential, init_args: {sigma_strt: 0.1}}}", "Did you mean 'sigma_start'?"),
    ],
)
def test_unknown_keys_in_yaml(text, expected, tmp_path, capsys, monkeypatch):
    (tmp_path / "bad.yaml").write_text(text)
    assert expected in answer(["fit", "--config", CONFIG, "--config", str(tmp_path / "bad.yaml")], capsys, monkeypatch)


def test_a_broken_file_is_named(tmp_path, capsys, monkeypatch):
    """Of several, and with the line."""
    monkeypatch.chdir(tmp_path)
    Path("broken.yaml").write_text("model:\n  model: tiny\n  lora: {rank: 4\n  noise: x\n")
    said = answer(["fit", "--config", CONFIG, "--config", "broken.yaml"], capsys, monkeypatch)
    assert said.startswith("qerl-pl: error: broken.yaml is not YAML: ")
    assert "at line 3, column 9" in said
    assert "unicode string" not in said


@pytest.mark.parametrize("text", ["", "# nothing\n", "hello"])
def test_a_file_without_settings_is_named(text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty.yaml").write_text(text)
    said = answer(["fit", "--config", CONFIG, "--config", "empty.yaml"], capsys, monkeypatch)
    assert (
        said == "qerl-pl: error: empty.yaml holds no settings; give a YAML file of them, such as model: {model: tiny}"
    )


def test_a_file_of_rows_is_no_prompt_source(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = '{"question": "a", "answer": "b"}'
    for name, text in (
        ("a.jsonl", "{}"),
        ("a.jsonl", f"{row}\n{row}\n"),
        ("a.json", f"[{row}]"),
        ("a.json", f"{row}\n{row}"),
    ):
        Path(name).write_text(text)
        for words in (["--data.train", name], [f"--data.train={name}"]):
            said = answer(["fit", "--config", CONFIG, *words], capsys, monkeypatch)
            assert f"data.train: {name} is no prompt source; give --data.train file --data.train.path {name}" in said
    Path("settings.json").write_text('{"class_path": "file", "init_args": {"path": "nowhere.jsonl"}}')
    assert "nowhere.jsonl" in answer(["fit", "--config", CONFIG, "--data.train", "settings.json"], capsys, monkeypatch)


@pytest.mark.parametrize(
    ("made", "name", "values"),
    [
        (QeRLModule, "max_grad_norm", [0, -1, math.nan]),
        (QeRLModule, "memory_gb", [0, -1.0]),
        (QeRLModule, "tokens_per_micro_batch", [0, -5]),
        (RolloutDataModule, "temperature", [0, -1, 1e-45, math.inf, math.nan]),
        (RolloutDataModule, "eval_temperature", [-1, 1e-3, math.inf, math.nan]),
        (RolloutDataModule, "top_p", [0, -1, 1.1, math.nan]),
        (RolloutDataModule, "eval_top_p", [0, 1.1]),
    ],
)
def test_numbers_that_would_spoil_a_run_without_a_word(made, name, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"^{name}: {value} must be "):
            made(**{name: value})
    RolloutDataModule(eval_temperature=0, temperature=0.01, top_p=0.1)


def test_an_optimizer_is_tried_before_anything_starts():
    with pytest.raises(ValueError, match=r"model\.optimizer\.lr: Invalid learning rate: -1"):
        QeRLModule(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=-1))
    QeRLModule(optimizer=lambda parameters: torch.optim.Muon(parameters, lr=0.1))  # takes only matrices


def test_missing_column(tmp_path, capsys, monkeypatch):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1 + 1?"}) + "\n")
    arguments = ["fit", "--config", CONFIG, "--data.train", "file", "--data.train.path", str(tmp_path / "rows.jsonl")]
    assert "has no answer column, only question; set columns: {answer:" in answer(arguments, capsys, monkeypatch)


@pytest.mark.parametrize(
    "arguments",
    [
        ["fit", "--data.train.size", "8"],
        ["fit", "--data.train", "file", "--data.train.path", "nowhere.jsonl"],
        ["fit", "--model.model", "./nothere"],
        ["fit", "--ckpt_path", "nowhere.ckpt"],
        ["test", "--ckpt_path", "nowhere.ckpt"],
    ],
    ids=" ".join,
)
def test_a_run_that_never_began_leaves_no_folder(arguments, tmp_path, capsys, monkeypatch):
    """One that is there already, because the version was named, is left alone."""
    monkeypatch.chdir(tmp_path)
    words = [arguments[0], "--config", CONFIG, *arguments[1:]]
    answer(words, capsys, monkeypatch)
    assert not list(tmp_path.glob("**/version_*"))
    (tmp_path / "runs" / "qerl" / "mine").mkdir(parents=True)
    answer([*words, "--trainer.logger.version", "mine"], capsys, monkeypatch)
    assert (tmp_path / "runs" / "qerl" / "mine" / "config.yaml").is_file()


OURS = f"events.out.tfevents.1.{socket.gethostname()}.{os.getpid()}.0"
OTHERS = f"events.out.tfevents.1.{socket.gethostname()}.{os.getpid()}1.0"
"""Logs of this process and of another."""


@pytest.mark.parametrize("kept", ["completions.jsonl", "checkpoints", "results", "adapter", OTHERS, f"{OURS}.before"])
def test_a_run_that_did_something_keeps_its_folder(kept, tmp_path):
    for name in ("config.yaml", "hparams.yaml", OURS):
        assert not nothing_but_config(tmp_path)
        (tmp_path / name).write_text("")
    assert len(nothing_but_config(tmp_path)) == 3
    (tmp_path / kept).mkdir()
    assert not nothing_but_config(tmp_path)


@pytest.mark.parametrize("late", [False, True])
def test_the_folder_of_a_run_that_lives_is_left_alone(late, tmp_path, capsys, monkeypatch):
    """Two that were started with one version: it was new to both, and one of them fails."""
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "runs" / "qerl" / "same" / OTHERS

    def appear():
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_text("")

    def run(self, subcommand, run=LightningCLI._run_subcommand):
        if not late:
            appear()
        run(self, subcommand)

    def look(folder, look=nothing_but_config):
        files = look(folder)
        if late:
            appear()
        return files

    monkeypatch.setattr(LightningCLI, "_run_subcommand", run)
    monkeypatch.setattr(lightning_cli, "nothing_but_config", look)
    words = ["fit", "--config", CONFIG, "--trainer.logger.version", "same", "--ckpt_path", "nowhere.ckpt"]
    assert "nowhere.ckpt" in answer(words, capsys, monkeypatch)
    assert other.is_file()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu(capsys, monkeypatch):
    said = answer(["fit", "--config", CONFIG, "--trainer.accelerator", "gpu"], capsys, monkeypatch)
    assert "gpu" in said.lower()


def test_every_command_is_known_and_told():
    assert set(QeRLCLI.subcommands()) == set(LIGHTNING)
    told = HELP.split("commands:\n")[1].split("\n\n")[0]
    assert [line.split()[0] for line in told.splitlines() if line[2:3] != " "] == [*LIGHTNING, *COMMANDS]


def test_help_of_one_component(capsys, monkeypatch):
    command = next(line.split("  ")[1] for line in HELP.splitlines() if ".help" in line)
    assert command.startswith("qerl-pl fit --model.noise.help ")
    monkeypatch.setattr(sys, "argv", ["qerl-pl"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as caught:
        main(command.split()[1:])
    assert caught.value.code == 0
    assert "--model.noise.sigma_start" in capsys.readouterr().out


def test_help_is_light():
    heavy = "{'torch', 'lightning', 'jsonargparse'} & {*sys.modules}"
    heavy = f"import sys; from qerl_pl.cli import main; main(['--help']); assert not {heavy}"
    done = subprocess.run(
        [sys.executable, "-c", heavy], capture_output=True, text=True, check=True, cwd=Path(CONFIG).parents[1]
    )
    assert "usage: qerl-pl COMMAND" in done.stdout
