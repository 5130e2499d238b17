"""qerl-pl verify: its table, its last line, its exit status, its errors."""

import json
from pathlib import Path
from typing import Any

import pytest

from qerl_pl import cli
from qerl_pl.verify import verify


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


ROWS = [
    {"gold": "#### 4", "response": "#### 4", "expected": True, "kind": "easy", "task": "gsm8k"},
    {"gold": "#### 4", "response": "#### 5", "expected": False, "kind": "easy", "task": "gsm8k"},
    {"gold": r"\frac{1}{2}", "response": r"\boxed{0.5}", "expected": True, "kind": "easy"},
    {"gold": "B", "response": "Answer: B or C", "expected": False, "kind": "hedge", "task": "mcq"},
    {"gold": "4", "response": "<answer>4</answer>", "expected": True, "kind": "tag", "task": "answer_tag"},
]


def test_all_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify([write(tmp_path / "rows.jsonl", ROWS)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["kind", "rows", "right", "correct", "wrong"],
        ["easy", "3", "3", "2", "1"],
        ["hedge", "1", "1", "0", "1"],
        ["tag", "1", "1", "1", "0"],
        ["all", "5", "5", "3", "2"],
        ["verify:", "5", "of", "5", "right,", "0", "hung,", "0", "crashed"],
    ]


def test_a_wrong_row_fails_unless_debatable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"gold": "4", "response": r"\boxed{5}", "expected": True}
    assert verify([write(tmp_path / "rows.jsonl", [*ROWS, row]), "--wrong"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[-2:] == [
        "line 6: gold '4', read '5': wrong, expected correct",
        "verify: 5 of 6 right, 0 hung, 0 crashed",
    ]
    assert verify([write(tmp_path / "rows.jsonl", [*ROWS, row | {"debatable": True}])]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "verify: 5 of 6 right, 0 hung, 0 crashed"


def test_without_expected_verdicts_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"gold": gold, "response": "so 4 it is"} for gold in ("4", "")]
    rows += [{"gold": "4", "response": "#### 4"}]
    assert verify([write(tmp_path / "rows.jsonl", rows), "--reward", "registry.rewards.gsm8k.GSM8K"]) == 0
    by_import_path = capsys.readouterr().out
    path = Path(write(tmp_path / "rows.jsonl", rows))
    path.write_text("\ufeff" + path.read_text(encoding="utf-8"), encoding="utf-8")  # a byte order mark
    assert verify([str(path), "--reward", "gsm8k"]) == 0
    assert (said := capsys.readouterr().out) == by_import_path
    assert [line.split() for line in said.splitlines()] == [
        ["kind", "rows", "correct", "no_answer", "unverifiable_gold"],
        ["math", "3", "1", "1", "1"],
        ["all", "3", "1", "1", "1"],
        ["1", "golds", "cannot", "be", "verified,", "such", "as", "''"],
    ]


@pytest.mark.parametrize(
    ("text", "options", "error"),
    [
        ("", [], "has no rows; give JSON lines with gold and response"),
        ('{"gold": "4"', [], ":1 is not JSON"),
        ("[1]", [], ":1 needs the keys gold and response"),
        ('{"gold": "4", "response": "4"}\n{"gold": "4"}', [], ":2 needs the keys gold and response"),
        ('{"gold": "4", "response": 4}', [], "response is 4; give the text of the completion"),
        ('{"gold": "4", "response": "4", "expected": 1}', [], "expected is 1; give true or false"),
        ('{"gold": "4", "response": "4", "task": "chess"}', [], "task 'chess' is not one of gsm8k, math"),
        ('{"gold": "4", "response": "4"}', ["--reward", "format"], "reward 'format' checks no gold; choose one of"),
        ('{"gold": "4", "response": "4"}', ["--reward", "maths"], "unknown reward 'maths'. Did you mean 'math'?"),
        ('{"gold": "4", "response": "4"}', ["--reward", "no.Where"], "--reward no.Where cannot be imported"),
        ('{"gold": "4", "response": "4"}', ["--reward", "registry.rewards.Reward"], "checks no gold; choose one of"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, options: list[str], error: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        cli.main(["verify", str(path), *options])
    assert stop.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("qerl-pl: error: ")
    assert error in line


def test_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["verify", "no/such/file.jsonl"])
    assert "No such file" in capsys.readouterr().err
