"""What qerl-pl quantize --task refuses, before anything else is done."""

import os
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from qerl_pl.quantize import command, report, task
from tests.quantized import TINY, arguments, refused

pytest.importorskip("llmcompressor", reason="needs llm-compressor: pip install 'qerl-pl[quantize]'")


def never(*_, **__):
    raise AssertionError("work was begun")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("", "holds no settings"),
        ("data: [", "while parsing a flow"),
        ("data: {tset: arithmetic}", "does not accept option 'data.tset'. Did you mean 'data.test'?"),
        ("data: {eval_samples: two}", "data.eval_samples: two must be a whole number"),
        ("data: {eval_samples: 0}", "eval_samples: 0 must be at least 1"),
        ("data: {engine: vlm}", "data.engine: unknown engine 'vlm'. Did you mean 'vllm'?"),
        ("data: {test: {class_path: file, init_args: {path: no.jsonl}}}", "there is no file no.jsonl"),
        ("data: {test: null}", "data.test: no prompts are configured; name a source"),
        ("data: {rewards: [format]}", "rewards: none of them checks correctness, so there is no pass@1 to report; add"),
        ("ckpt_path: last", "adapter: none and ckpt_path: last; give one of the two"),
        ("trainer: {logger: false}", "trainer.logger"),
    ],
)
@pytest.mark.parametrize("place", ["report", "output"])
def test_a_config_that_test_refuses(place, config, said, made, texts, tmp_path, monkeypatch, capsys):
    shutil.copytree(made["rtn"], tmp_path / "report")
    before = {f: f.read_bytes() for f in (tmp_path / "report").iterdir()}
    (tmp_path / "task.yaml").write_text(config)
    monkeypatch.setattr(command, "write", never)
    monkeypatch.setattr(report, "assess", never)
    monkeypatch.setattr(subprocess, "run", never)
    words = arguments(texts, **{place: tmp_path / place}, task=tmp_path / "task.yaml")
    answer = refused(words, capsys, monkeypatch)
    assert answer.startswith(f"qerl-pl: error: --task {tmp_path / 'task.yaml'}: ") and said in answer
    assert {f: f.read_bytes() for f in (tmp_path / "report").iterdir()} == before
    assert not (tmp_path / "output").exists()


def test_what_only_the_engine_refuses_comes_before_other_work(made, texts, tmp_path, monkeypatch, capsys):
    shutil.copytree(made["rtn"], tmp_path / "there")
    (tmp_path / "task.yaml").write_text("data: {eval_samples: 1}")
    monkeypatch.setattr(report, "assess", never)
    failed = subprocess.CompletedProcess([], 2, "qerl-pl: error: no memory")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    words = arguments(texts, report=tmp_path / "there", task=tmp_path / "task.yaml")
    assert "task.yaml: qerl-pl test failed: qerl-pl: error: no memory" in refused(words, capsys, monkeypatch)


def test_the_check_leaves_the_process_as_it_was(tmp_path, monkeypatch):
    """Calibration and report run in it after."""
    (tmp_path / "task.yaml").write_text("seed_everything: 5\ntrainer: {deterministic: true}")
    for name in task.ENVIRONMENT[1:]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PL_GLOBAL_SEED", "77")
    given = SimpleNamespace(task=tmp_path / "task.yaml", report=TINY, output=None, format="nvfp4", group_size=None)
    task.check_task(given, TINY)
    assert not torch.are_deterministic_algorithms_enabled()
    assert [os.environ.get(name) for name in task.ENVIRONMENT] == ["77", None, None]
