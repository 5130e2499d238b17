"""Two results, paired by problem, by hand."""

import json
import math
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from qerl_pl.cli import main
from qerl_pl.comparison import command, compare, differing, read, table, trained_with
from qerl_pl.evaluation import pass_rate, report
from qerl_pl.statistics import mean_difference
from tests.test_evaluation import SETTINGS, graded
from tests.test_evaluation import batch as graded_batch


def summary(right: list[int], samples: int = 1, ids: str = "abcdefghij") -> dict:
    one = graded_batch([["1"] * r + ["2"] * (samples - r) for r in right], ["1"] * len(right))
    problems = graded(one).sets[""]
    rows = [{"id": id_, "right": r} for id_, r in zip(ids, right, strict=False)]
    return {"samples": samples, "pass@1": asdict(pass_rate(problems)), "rows": rows}


def result(settings: dict | None = None, **sets: dict) -> dict:
    return {"settings": SETTINGS | (settings or {}), "sets": sets}


def test_by_hand():
    a, b = result(x=summary([1, 1, 0, 0, 0, 0])), result(x=summary([1, 0, 1, 1, 1, 0]))
    found = compare(a, b)["x"]
    assert (found.problems, found.better, found.worse, found.equal) == (6, 3, 1, 2)
    assert found.difference == mean_difference([0, -1, 1, 1, 1, 0], 1)
    assert found.difference.value == pytest.approx(1 / 3)
    assert found.p_value == pytest.approx(2 * (1 + 4) / 16)  # of four problems that changed, one for the worse


def test_problems_are_paired_by_name_not_by_place():
    a = result(x=summary([1, 0, 0], ids="abc"))
    b = result(x=summary([0, 1, 1], ids="cab"))  # a 1 -> 1, b 0 -> 1, c 0 -> 0
    found = compare(a, b)["x"]
    assert (found.better, found.worse, found.equal) == (1, 0, 2)


def test_several_samples():
    a, b = result(x=summary([2, 0, 1], samples=2)), result(x=summary([4, 1, 1], samples=4))
    found = compare(a, b)["x"]
    assert found.difference == mean_difference([0, 0.25, -0.25], 2)  # the fewer samples
    assert (found.better, found.worse, found.equal, found.p_value) == (1, 1, 1, None)


def test_what_cannot_be_paired():
    one = result(x=summary([1, 0]))
    with pytest.raises(ValueError, match="A has the sets x, B has y; evaluate both on the same"):
        compare(one, result(y=summary([1, 0])))
    with pytest.raises(ValueError, match="of the problems of x 1 are only in A and 2 only in B"):
        compare(one, result(x=summary([1, 0, 1], ids="acd")))


def test_table_has_a_mean_over_sets():
    a, b = result(x=summary([1, 0]), y=summary([0, 0])), result(x=summary([1, 1]), y=summary([0, 0]))
    lines = table(compare(a, b)).splitlines()
    assert [line.split("|")[1].strip() for line in lines] == ["set", "----", "x", "y", "mean"]
    assert "+25.0 (" in lines[-1] and "+50.0 (" in lines[2]


def test_settings_that_differ():
    a, b = result({"policy": "base alone"})["settings"], result({"policy": "adapter x", "seed": 1})["settings"]
    assert differing(a, b | {"sources": 1}) == [["policy", "base alone", "adapter x"], ["seed", "", "1"]]


def test_how_the_policies_were_trained(tmp_path, capsys, monkeypatch):
    """Two checkpoints, and the run of a third result itself: what their fits had in different ways."""
    for name, lr in (("a", 0.1), ("b", 0.3), ("c", 0.1)):
        settings = {"model": {"optimizer": {"lr": lr}, "rank": 8}, "data": {}, "ckpt_path": name}
        (tmp_path / name / "results").mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text(json.dumps(settings))
        policy = f"checkpoint {tmp_path}/{name}/checkpoints/last.ckpt" if name != "c" else "after 9 rollout batches"
        (tmp_path / name / "results" / "test.json").write_text(
            json.dumps(result({"policy": policy}, x=summary([1, 0])))
        )
    files = {name: str(tmp_path / name / "results" / "test.json") for name in "abc"}
    command([files["a"], files["b"]])
    rows = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()]
    assert ["", "fit: model.optimizer.lr", "0.1", "0.3", ""] in rows
    assert not any("rank" in cell or "ckpt_path" in cell for row in rows for cell in row)
    command([files["c"], files["b"]])
    assert "| fit: model.optimizer.lr | 0.1 | 0.3 |" in " ".join(capsys.readouterr().out.split())
    command([files["a"], files["c"]])
    assert "fit:" not in capsys.readouterr().out
    assert trained_with(tmp_path, "base alone") == trained_with(tmp_path, f"adapter {tmp_path}/d/adapter") == {}
    assert trained_with(tmp_path, f"adapter {tmp_path}/b/adapter")["model.optimizer.lr"] == 0.3
    monkeypatch.chdir(tmp_path / "b")  # of another place's run this says nothing
    assert trained_with(tmp_path, "checkpoint checkpoints/last.ckpt") == {}
    assert trained_with(Path("results/test.json"), "after 9 rollout batches")["model.optimizer.lr"] == 0.3
    assert trained_with(Path("test.json"), "after 9 rollout batches") == {}


@pytest.mark.parametrize("text", ["- a list", "a: [1", "a: !!python/name:os.system", "model: of another tool", "\xff"])
def test_the_config_of_another_tool(tmp_path, text):
    (tmp_path / "config.yaml").write_bytes(text.encode("latin1"))
    assert trained_with(tmp_path, f"adapter {tmp_path}/adapter") == {}


def test_command(tmp_path, capsys):
    for name, right in (("a", [1, 0]), ("b", [1, 1])):
        (tmp_path / f"{name}.json").write_text(json.dumps(result({"policy": name}, x=summary(right))))
    main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])
    said = capsys.readouterr().out
    assert "| policy  | a | b |" in said and "+50.0 (" in said
    command(["--help"])
    assert "usage: qerl-pl compare A.json B.json" in capsys.readouterr().out
    with pytest.raises(ValueError, match="1 arguments; give two files"):
        command(["a.json"])
    with pytest.raises(ValueError, match=r"there is no file nowhere\.json; qerl-pl test"):
        command(["nowhere.json", "nowhere.json"])
    for text in ("{", "[]", "{}", '{"sets": {"x": {}}}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match="is no result of qerl-pl test or validate"):
            read(tmp_path / "bad.json")


ROW = {"id": "a", "right": 1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": [{"right": 1}, ROW]}, "x: row 1 has no id"),
        ({"rows": [ROW, 5]}, "x: row 2 has no id"),
        ({"rows": [ROW, ROW]}, "x: the id 'a' is given twice"),
        *(({"rows": [{"id": "b", "right": n}, ROW]}, f"x: right of 'b' is {n!r}, not a whole number in 0..2")
          for n in (3, -1, 0.5, True, None)),
        *(({"samples": n}, f"x: samples is {n!r}, not a whole number from 1") for n in (0, None, 1.5)),
        ({"pass@1": None}, "x: pass@1 is None, not value, low and high"),
        ({"pass@1": {"value": 0.75}}, "x: pass@1 is {'value': 0.75}, not value, low and high"),
        ({"pass@1": {"value": 0.76, "low": 0, "high": 1}}, "x: pass@1 is 0.76, but 1.5 of 2 rows are right"),
        ({"pass@1": {"value": math.nan, "low": 0, "high": 1}}, "x: pass@1 is nan, but 1.5 of 2 rows are right"),
        ({"rows": []}, "x: pass@1 is 0.75, but 0 of 0 rows are right"),
    ],
)  # fmt: skip
def test_results_that_contradict_themselves(tmp_path, change, said):
    path = tmp_path / "test.json"
    path.write_text(json.dumps(result(x=summary([1, 2], samples=2))))
    read(path)
    path.write_text(json.dumps(result(x=summary([1, 2], samples=2) | change)))
    with pytest.raises(ValueError, match=re.escape(f"compare: {path}: {said}; give it as")):
        read(path)


def test_results_without_settings_or_of_another_encoding(tmp_path):
    path, whole = tmp_path / "test.json", result(x=summary([1, 0]))
    for settings in (None, {}, {"policy": None}):
        path.write_text(json.dumps(whole | {"settings": settings}))
        with pytest.raises(ValueError, match=r"test\.json: settings\.policy is missing; give"):
            read(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"test\.json is no text in UTF-8"):
        read(path)


def test_what_an_evaluation_reports_is_believed(tmp_path):
    """Thirds are no round numbers."""
    problems = graded(graded_batch([["1", "2", "2"], ["1", "1", "2"], ["2", "2", "2"]], ["1"] * 3))
    for i, problem in enumerate(problems.sets[""]):
        problem.id = f"problem {i}"
    written = report("test", SETTINGS, problems, None)
    (tmp_path / "test.json").write_text(json.dumps(written))
    assert read(tmp_path / "test.json") == json.loads(json.dumps(written))
