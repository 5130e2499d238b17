"""The rows of qerl-pl bench: how they are merged, what a file says of where it comes from, and its pictures."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qerl_pl.bench import machine, plot, results
from qerl_pl.bench.commands import bench

ROOT = Path(__file__).parents[1]


def rows(path: Path, *names: str) -> list[tuple]:
    return [tuple(row.get(name) for name in names) for row in json.loads(path.read_text())["rows"]]


def test_rows_are_merged(tmp_path, capsys):
    """Measured again, a row replaces the old one; a failed candidate is a row, and an error at the end."""
    output = tmp_path / "out" / "rows.json"
    first = results.Results("rollout", output, "test")
    for batch in (1, 2):
        first.add({"model": "7B", "batch": batch, "memory_gb": None}, results.spread("tokens_per_s", [1.0, 5.0, 3.0]))
    with first.candidate({"model": "14B"}):
        raise torch.OutOfMemoryError("no")
    first.finish()
    assert "3 (1-5)" in capsys.readouterr().out
    second = results.Results("rollout", output, "test")
    second.add({"model": "7B", "batch": 2}, {"tokens_per_s": 7.00001})
    second.add({"model": "14B", "batch": 2}, {"tokens_per_s": 8.0})
    with second.candidate({"model": "32B"}):
        raise RuntimeError("broken\nin two lines")
    assert rows(output, "model", "batch", "tokens_per_s", "error", "run") == [
        ("7B", 1, 3.0, None, 0), ("7B", 2, 7.0, None, 1), ("14B", 2, 8.0, None, 1),
        ("32B", None, None, "RuntimeError: broken", 1),
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match="1 candidates failed, first: RuntimeError: broken"):
        second.finish()


def test_a_failure_does_not_take_the_place_of_what_was_measured(tmp_path):
    found = []
    for measured in ({"kl": 1.0}, {"error": "no"}, {"kl": 2.0}):
        results.Results("formats", tmp_path / "r.json", "test").add({"model": "m", "format": "nvfp4"}, measured)
        found.append(rows(tmp_path / "r.json", "kl", "error"))
    assert found == [[(1.0, None)], [(1.0, None), (None, "no")], [(2.0, None)]]


def test_a_result_names_its_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_output", lambda *_: None)  # as without git
    results.Results("train", None).add({"model": "7B"}, {"milliseconds": 1.0})
    with pytest.raises(ValueError, match="no git checkout; give --commit"):
        results.Results("train", tmp_path / "train.json")
    answers = {"rev-parse": "abc", "status": " M file"}
    monkeypatch.setattr(machine, "_output", lambda _, word, *__: answers.get(word))
    assert machine.describe()["commit"] == "abc, changed"


@pytest.mark.parametrize(
    ("started", "expected"),
    [
        (["/anywhere/bin/qerl-pl", "bench", "train", "--options", "a b"], "qerl-pl bench train --options 'a b'"),
        (["/anywhere/qerl_pl/__main__.py", "bench", "sync"], "qerl-pl bench sync"),
        (["benchmarks/linear.py", "--tokens", "1,2"], "python benchmarks/linear.py --tokens 1,2"),
        (["/anywhere/benchmarks/linear.py"], "python benchmarks/linear.py"),
    ],
)
def test_a_result_names_its_command(started, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", started)
    output = tmp_path / "rows.json"
    results.Results("train", output, "test").add({"model": "7B"}, {"milliseconds": 1.0})
    assert json.loads(output.read_text())["runs"][0]["command"] == expected


def test_benchmarks_name_their_command(tmp_path):
    words = ["benchmarks/coverage.py", "--output", str(tmp_path / "out.json"), "--evaluations", "1", "--commit", "test"]
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
    assert json.loads((tmp_path / "out.json").read_text())["command"] == " ".join(["python", *words])


def test_spread_and_seconds():
    assert results.spread("x", [3.0, 1.0, 2.0, 10.0]) == {"x": 2.5, "x_min": 1.0, "x_max": 10.0}
    calls: list[int] = []
    assert len(results.seconds(lambda: calls.append(1), repeats=3, warm_up=2)) == 3
    assert len(calls) == 5
    with pytest.raises(ValueError, match="--repeats: 0 must be at least 1"):
        results.seconds(lambda: None, 0)


def test_repeats_are_checked_before_anything_is_built():
    with pytest.raises(ValueError, match="--repeats: 0 must be at least 1"):
        bench(["train", "--model", "7B", "--repeats", "0"])  # 7B would be refused for want of a GPU


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    rollout = results.Results("rollout", tmp_path / "rollout.json", "test")
    for model, format_, batch in itertools.product(("7B", "14B"), ("nvfp4", "bf16"), (1, 8)):
        what = {"model": model, "format": format_, "rank": 32, "batch": batch}
        rollout.add(what, results.spread("tokens_per_s", [batch * 1.0, batch * 3.0]))
    rollout.add({"model": "32B"}, {"error": "e"})
    memory = results.Results("memory", tmp_path / "memory.json", "test")
    memory.add({"model": "7B", "format": "bf16"}, {"error": "e"})
    with pytest.raises(ValueError, match=r"memory\.png: no row has peak_gb"):
        bench(["plot", str(tmp_path)])
    memory.add({"model": "7B", "format": "nvfp4"}, {"peak_gb": 11.0})
    bench(["plot", str(tmp_path)])
    assert sorted(f.name for f in tmp_path.glob("*.png")) == ["memory.png", "rollout.png"]


def test_a_series_has_one_color_on_all_axes(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn, axes = plot._grouped, []

    def grouped(axis, *rest):
        axes.append(axis)
        drawn(axis, *rest)

    monkeypatch.setattr(plot, "_grouped", grouped)
    found = results.Results("rollout", tmp_path / "rollout.json", "test")
    for model, format_ in (("7B", "nvfp4"), ("7B", "bf16"), ("14B", "bf16")):
        found.add({"model": model, "format": format_, "batch": 1}, {"tokens_per_s": 1.0})
    bench(["plot", str(tmp_path)])
    (nvfp4, bf16), [alone] = ([bar.get_facecolor() for bar in axis.patches] for axis in axes)
    assert alone == bf16 != nvfp4


def test_a_plot_names_the_runs_that_its_rows_are_from():
    """Not those whose rows have all been measured again."""
    runs = [{"date": f"2000-01-0{day}", "commit": commit} for day, commit in ((1, "a"), (2, "b"), (2, "c"))]
    rows = [{"run": 2}, {"run": 0}, {"run": 2}]
    assert plot._from({**runs[2], "runs": runs, "rows": rows}) == "2000-01-01, 2000-01-02 · a, c"


def test_numbers_on_an_axis_are_in_order():
    assert plot._groups([{"batch": n} for n in (8, 256, 16)] + [{}], "batch") == [8, 16, 256]
    assert plot._groups([{"model": m} for m in ("7B", "14B", "7B")], "model") == ["7B", "14B"]
