"""benchmarks/formats.py without its runs: what it refuses, and what becomes of the rows of an earlier call."""

import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quantized import write_texts

ROOT = Path(__file__).parents[1]


@pytest.fixture
def formats(monkeypatch):
    """The script as a module; ``formats.asked``: what it would have run."""
    spec = importlib.util.spec_from_file_location("formats", ROOT / "benchmarks" / "formats.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.asked = []
    monkeypatch.setattr(module, "alone", lambda name, *_: module.asked.append(name) or row(name))
    return module


def row(name: str, kl: float = 0.25) -> dict:
    interval = {"value": kl, "low": 0.125, "high": 0.5}
    return {
        "format": name, "bits_per_weight": 4.5, "bytes": 2 * 10**9, "weight_error": 0.125, "weight_error_by_kind": {},
        "kl": interval, "pass@1": interval, "entropy": {"1.0": interval, "0.5": interval},
        "entropy_by_prompt": {"1.0": [0.1, 0.2], "0.5": [0.1, 0.2]}, "fit": {"seconds": 1.0},
    }  # fmt: skip


def call(script, monkeypatch, tmp_path, **more) -> None:
    if not (tmp_path / "texts.jsonl").exists():
        write_texts(tmp_path / "texts.jsonl")
    given = {"model": "tiny", "texts": tmp_path / "texts.jsonl", "sequences": 2, "length": 32, "temperatures": "1.0",
             "output": tmp_path / "out.json", "commit": "test"} | more  # fmt: skip
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["benchmarks/formats.py", *words, "--", "--config", "configs/tiny.yaml"])
    script.main()


def rows(path: Path, *names: str) -> list[tuple]:
    return [tuple(r.get(name) for name in names) for r in json.loads(path.read_text())["rows"]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--temperatures", "1.0,hot"], "--temperatures 1.0,hot: numbers with commas"),
        (["--temperatures", "0,1"], "--temperatures 0,1: entropy is that of sampling, above 0"),
        (["--prompts", "1"], "--prompts 1: an interval takes at least two"),
        (["--sequences", "1"], "--sequences 1: an interval takes at least two"),
    ],
)
def test_settings_are_refused_before_anything_runs(tmp_path, words, said):
    words = ["--model", "none", "--texts", "none", "--output", str(tmp_path / "out.json"), *words]
    done = subprocess.run(
        [sys.executable, "benchmarks/formats.py", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"texts": "no.txt"}, "--texts no.txt: there is no file no.txt"),
        ({"texts": "no.jsonl"}, "--texts no.jsonl: there is no file no.jsonl"),
        ({"texts": "gsm9k"}, "--texts gsm9k: unknown prompt source 'gsm9k'. Did you mean 'gsm8k'?"),
        ({"texts": "me/mine"}, "--texts me/mine: cannot be reached (no 'me/mine'); download it, or give a .jsonl, "),
        ({"texts": "gsm8k"}, "--texts gsm8k: cannot be reached (no 'openai/gsm8k'); download it, or give a .jsonl, "),
        ({"texts": "{}/row.jsonl"}, "--texts {}/row.jsonl: line 1 has the columns a; give text"),
        ({"texts": "{}/empty.txt"}, "--texts {}/empty.txt: it has 0 of 2 × 32 = 64 tokens for held_out (0 rows)"),
        ({"texts": "{}/short.txt"}, "--texts {}/short.txt: it has 3 of 2 × 32 = 64 tokens for held_out (1 rows); lower "
         "--sequences or --length, or give more text"),
        ({"model": "./no"}, "--model: there is no folder './no'"),
        ({"formats": "nvfp4,int5"}, "--formats: unknown int5; choose from bf16, fp8"),
        ({"output": "{}/other.json"}, "other.json holds no runs and rows; name another file, or remove it"),
        ({"output": "{}/short.txt"}, "short.txt holds no runs and rows; name another file, or remove it"),
    ],
)  # fmt: skip
def test_files_are_refused_before_anything_runs(more, said, formats, tmp_path, monkeypatch, capsys):
    import datasets

    def load_dataset(name, *args, **more):
        raise ConnectionError(f"no {name!r}")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "short.txt").write_text("1 + 2")
    (tmp_path / "row.jsonl").write_text('{"a": 1}')
    (tmp_path / "other.json").write_text('{"runs": {}, "rows": 3}')
    before = {f: f.read_bytes() for f in tmp_path.iterdir()}
    with pytest.raises(SystemExit) as caught:
        call(formats, monkeypatch, tmp_path, **{k: v.format(tmp_path) for k, v in more.items()})
    error = capsys.readouterr().err
    assert caught.value.code == 2 and said.format(tmp_path) in error
    assert "calibration" not in error  # as qerl-pl quantize calls texts
    assert formats.asked == []
    assert {f: f.read_bytes() for f in tmp_path.iterdir() if f in before} == before
    assert not (tmp_path / "out.json").exists()


def test_a_second_call_adds_rows(formats, tmp_path, monkeypatch, capsys):
    """And replaces those that were measured with the same settings."""
    out = tmp_path / "out.json"
    call(formats, monkeypatch, tmp_path, formats="bf16,int4")
    assert rows(out, "format", "run") == [("bf16", 0), ("int4", 0)]
    assert rows(out, "bytes", "kl")[0] == (2 * 10**9, row("")["kl"])
    monkeypatch.setattr(
        formats, "alone", lambda name, *_: row(name, 0.75) if name == "int4" else {"format": name, "error": "e"}
    )
    with pytest.raises(SystemExit) as caught:
        call(formats, monkeypatch, tmp_path, formats="int4,fp8")
    assert caught.value.code == 1
    found = [(f, run, kl and kl["value"], error) for f, run, kl, error in rows(out, "format", "run", "kl", "error")]
    assert found == [("bf16", 0, 0.25, None), ("int4", 1, 0.75, None), ("fp8", 1, None, "e")]
    capsys.readouterr()
    call(formats, monkeypatch, tmp_path, formats="int4", temperatures="1.0,0.5")
    assert rows(out, "format", "run") == [("bf16", 0), ("int4", 1), ("fp8", 1), ("int4", 2)]
    result = json.loads(out.read_text())
    asked = ["--formats bf16,int4", "--formats int4,fp8", "--temperatures 1.0,0.5"]
    assert all(words in made["command"] for words, made in zip(asked, result["runs"], strict=True))
    printed = capsys.readouterr().out
    assert "| int4 | 2.000 | 12.5% | 0.7500 | 0.750 | 0.750 | 75.0% ± 18.8% |" in printed
    assert "entropy_by_prompt" not in printed


def test_the_published_results_can_be_measured_again(formats, tmp_path, monkeypatch):
    """By the command that made them: each row takes the place of its own, and no other."""
    out = tmp_path / "formats.json"
    shutil.copy(ROOT / "benchmarks" / "results" / "h200" / "formats.json", out)
    before = json.loads(out.read_text())
    _, *words = shlex.split(before["command"])
    words[words.index("--output") + 1] = str(out)
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(formats, "held_out", lambda _: [])
    old = {r["format"]: r for r in before["rows"]}
    monkeypatch.setattr(formats, "alone", lambda name, *_: {key: old[name][key] for key in row(name)})
    formats.main()
    assert sorted(rows(out, "format", "run")) == [(f, 1) for f in sorted(old)]
    assert [run["commit"] for run in json.loads(out.read_text())["runs"]] == ["f3b0844", "f3b0844"]
