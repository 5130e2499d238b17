"""The recipes in configs/: each is read whole, says what the paper says, and its baseline differs in nothing else."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from qerl_pl.engine import ENGINES
from qerl_pl.lightning_cli import QeRLCLI
from registry.noise import Exponential, NoNoise
from registry.prompts import BigMath, GSM8KProblems
from registry.quantization import FORMATS, NVFP4

CONFIGS = Path(__file__).parents[1] / "configs"
PAPER = {  # model, G, μ, longest completion, clip range (paper §4.1 and its scripts)
    "grpo_3b": ("3B", 8, 4, 4096, (0.8, 1.2)),
    "grpo_7b": ("7B", 8, 4, 4096, (0.8, 1.2)),
    "dapo_7b": ("7B", 16, 1, 8192, (0.8, 1.28)),
    "dapo_14b": ("14B", 16, 1, 8192, (0.8, 1.28)),
    "dapo_32b": ("32B", 16, 1, 8192, (0.8, 1.28)),
}


class AdamW8bit(torch.optim.AdamW):
    """Stands in where bitsandbytes is not installed."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 1e-2
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)


@pytest.fixture
def bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        for name in ("bitsandbytes", "bitsandbytes.optim"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(sys.modules["bitsandbytes"], "optim", sys.modules["bitsandbytes.optim"], raising=False)
        monkeypatch.setattr(AdamW8bit, "__module__", "bitsandbytes.optim")
        monkeypatch.setattr(sys.modules["bitsandbytes.optim"], "AdamW8bit", AdamW8bit, raising=False)


def read(*names: str) -> QeRLCLI:
    return QeRLCLI(args=[part for name in names for part in ("--config", str(CONFIGS / name))], run=False)


def test_these_are_the_recipes() -> None:
    assert {p.stem for p in CONFIGS.glob("*.yaml")} == {*PAPER, "gsm8k_0.5b", "tiny"}


@pytest.mark.parametrize("name", PAPER)
def test_settings_of_the_paper(name: str, bitsandbytes: None) -> None:
    cli = read(f"{name}.yaml")
    model, data = cli.model, cli.datamodule
    size, generations, passes, longest, clip = PAPER[name]
    assert model.model == f"Qwen/Qwen2.5-{size}-Instruct"
    assert isinstance(model.quantization, NVFP4) and isinstance(data.engine, ENGINES["vllm"])
    assert (model.lora.rank, model.lora.alpha, len(model.lora.targets)) == (32, 32, 7)
    assert (model.loss.num_iterations, model.loss.beta, model.loss.loss_type) == (passes, 0.0, name[:4])
    assert model.loss.clip == pytest.approx(clip)
    assert (data.batch, data.sampling.n, data.sampling.max_tokens) == (128, generations, longest)
    assert (data.sampling.temperature, data.sampling.top_p) == (1.0, 1.0)
    assert (data.eval_sampling.temperature, data.eval_sampling.top_p) == (0.6, 0.95)
    assert isinstance(model.noise, Exponential)
    # None in the first of eleven stages of 100 batches, then 1e-2 down to 5e-4.
    sigmas = [model.noise.sigma(step, 1100) for step in (0, 150, 1099)]
    assert sigmas == pytest.approx([0.0, 1e-2, 5e-4])
    assert (model.lr_schedule, model.warmup, model.max_grad_norm) == ("cosine", 0.1, 0.2)
    optimizer = model.make_optimizer([torch.nn.Parameter(torch.zeros(4))])
    assert type(optimizer).__name__ == "AdamW8bit"
    (group,) = optimizer.param_groups
    assert (group["lr"], tuple(group["betas"]), group["weight_decay"]) == (1e-5, (0.9, 0.99), 0.1)
    train = data.sources["train"]
    if name.startswith("grpo"):
        assert isinstance(train, GSM8KProblems) and train.split == "train"
    else:
        assert isinstance(train, BigMath) and train.levels == ([4, 5] if size == "32B" else [3, 4, 5])


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    return {k: v for key, inner in value.items() for k, v in leaves(inner, f"{path}.{key}" if path else key).items()}


@pytest.mark.parametrize("name", PAPER)
def test_the_baseline_differs_in_format_rate_and_noise(
    name: str, bitsandbytes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*names: str) -> dict[str, Any]:
        capsys.readouterr()
        arguments = [part for n in names for part in ("--config", str(CONFIGS / n))]
        with pytest.raises(SystemExit):
            QeRLCLI(args=[*arguments, "--print_config"], run=False)
        return leaves(yaml.safe_load(capsys.readouterr().out))

    ours, baseline = printed(f"{name}.yaml"), printed(f"{name}.yaml", "formats/bf16.yaml")
    missing = object()
    differ = {key for key in ours.keys() | baseline.keys() if ours.get(key, missing) != baseline.get(key, missing)}
    assert {key for key in differ if not key.startswith("model.noise.")} == {
        "model.quantization.class_path",
        "model.optimizer.init_args.lr",
    }
    assert baseline["model.quantization.class_path"] == "registry.quantization.bf16.BF16"
    assert baseline["model.optimizer.init_args.lr"] == 5e-6
    assert baseline["model.noise.class_path"] == "registry.noise.schedules.NoNoise"


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"nvfp4"}))
def test_every_other_format_has_a_sub_config(name: str, bitsandbytes: None, capsys: pytest.CaptureFixture[str]) -> None:
    """NF4 is the paper's QLoRA: NVFP4's rate, no noise. The rest keeps all that the recipe says."""
    cli, ours = read("grpo_7b.yaml", f"formats/{name}.yaml"), read("grpo_7b.yaml")
    assert type(cli.model.quantization) is FORMATS[name]
    rates = [c.model.make_optimizer([torch.nn.Parameter(torch.zeros(4))]).param_groups[0]["lr"] for c in (cli, ours)]
    assert (rates[0] == rates[1] == 1e-5) == (name != "bf16")
    assert isinstance(cli.model.noise, NoNoise if name in ("bf16", "nf4") else Exponential)


def test_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)

    class Hidden:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> None:
            if name.partition(".")[0] == "bitsandbytes":
                raise ModuleNotFoundError("No module named 'bitsandbytes'", name="bitsandbytes")

    monkeypatch.setattr(sys, "meta_path", [Hidden, *sys.meta_path])
    with pytest.raises(SystemExit):
        read("grpo_3b.yaml")
    assert capsys.readouterr().err.strip() == (
        "qerl-pl: error: model.optimizer: bitsandbytes is not installed; pip install 'qerl-pl[bitsandbytes]'"
    )


@pytest.mark.parametrize("more", [[], ["--data.test.a.init_args.limit", "1"]], ids=["", "limit"])
def test_columns_of_one_of_several_sets(more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """jsonargparse tries the sets as one source first; what it did to them must not be seen by the next try."""
    monkeypatch.setattr(QeRLCLI, "_run_subcommand", lambda self, subcommand: None)

    def fit(*arguments: str) -> QeRLCLI:
        monkeypatch.setattr(sys, "argv", ["qerl-pl", "fit", *arguments])
        return QeRLCLI()

    (tmp_path / "rows.jsonl").write_text('{"query": "1 + 1?", "result": "2", "level": 3}\n')
    source = {
        "class_path": "file",
        "init_args": {
            "path": str(tmp_path / "rows.jsonl"),
            "columns": {"prompt": "query", "answer": "result"},
            "where": {"level": {"min": 2}},
        },
    }
    (tmp_path / "sets.yaml").write_text(yaml.safe_dump({"data": {"test": {"a": source, "b": source}}}))
    cli = fit("--config", str(CONFIGS / "tiny.yaml"), "--config", str(tmp_path / "sets.yaml"), *more)
    assert [dict(rows[0]) for rows in cli.datamodule.sets("test").values()] == [
        {"prompt": "1 + 1?", "answer": "2", "level": 3}
    ] * 2
    (tmp_path / "again.yaml").write_text(cli._parser("fit").dump(cli.config.fit, skip_none=False))
    again = fit("--config", str(tmp_path / "again.yaml"))
    assert again.datamodule.sets("test")["a"].columns == {"prompt": "query", "answer": "result"}


@pytest.mark.parametrize("words", [["--config", "configs/tiny.yaml"], ["--config=configs/tiny.yaml"]])
def test_recipes_from_any_folder(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder's own file comes first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["qerl-pl"])
    written = yaml.safe_load((CONFIGS / "tiny.yaml").read_text())["data"]["prompts_per_batch"]
    assert QeRLCLI(args=words, run=False).config.data.prompts_per_batch == written != 3
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/tiny.yaml").write_text("data: {prompts_per_batch: 3}\n")
    assert QeRLCLI(args=words, run=False).config.data.prompts_per_batch == 3
