"""What a run says of itself; whole runs are in test_fit.py."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from qerl_pl.callbacks.said import beginning, card, command
from qerl_pl.policy import LoRA
from registry.prompts import Arithmetic, File
from registry.quantization import FP8
from registry.rewards import ThinkAnswer


def run(model: str = "tiny", norms: tuple[str, ...] = (), source=Arithmetic(), done: int = 0):
    """Trainer and module of a run."""
    data = SimpleNamespace(
        sources={"train": source}, done=done, batch=4, sampling=SimpleNamespace(n=8), engine=object(),
        train_dataloader=lambda: SimpleNamespace(prompts=range(1234)),
        collector=SimpleNamespace(answer_format=ThinkAnswer()),
    )  # fmt: skip
    module = SimpleNamespace(
        model=model, lora=LoRA(rank=16, alpha=8, rank_stabilized=True, targets=("q_proj",)), quantization=FP8(),
        trained_norms=norms, total_rollouts=2000,
    )  # fmt: skip
    return SimpleNamespace(datamodule=data), module


@pytest.mark.parametrize(
    ("source", "expected"),
    [(Arithmetic(), "Arithmetic (generated word problems)"), (File("mine.jsonl"), "File mine.jsonl"), ([{}], "list")],
    ids=["embedded", "file", "of a user's own"],
)
def test_what_is_trained(source, expected):
    assert beginning(*run("./my-3b", source=source)) == (
        "model ./my-3b in FP8, LoRA rank 16, engine object\n"
        f"1,234 training prompts of {expected}: 2,000 rollouts of 4 prompts x 8 completions"
    )
    assert beginning(*run(source=source, done=7)).endswith("x 8 completions, 7 of them done")


def test_commands_can_be_pasted(tmp_path):
    folder = tmp_path / "my run"
    folder.mkdir()
    assert command("fit", folder, Path("last.ckpt")) == "qerl-pl fit --config FILE --ckpt_path last.ckpt"
    (folder / "config.yaml").write_text("")
    assert command("test", folder, folder / "last.ckpt") == (
        f"qerl-pl test --config '{folder}/config.yaml' --ckpt_path '{folder}/last.ckpt'"
    )


def test_cards(tmp_path):
    text = lambda *what: card(*run(*what), tmp_path / "adapter", tmp_path / "last.ckpt")  # noqa: E731
    assert "base_model: owner/name\n" in text("owner/name")
    assert "alpha 32, on q_proj\n" in text("owner/name")  # as saved: 8 x the root of 16
    (tmp_path / "base").mkdir()
    for local in ("tiny", str(tmp_path / "base"), "random:7B"):
        assert "base_model:" not in text(local)
    assert "AutoPeftModel" in text("owner/name") and "AutoPeftModel" not in text("random:7B")
    assert "norms.safetensors" in text("tiny", ("norm",)) and "norms" not in text("tiny")
