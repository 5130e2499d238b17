"""Prompt sources: the layouts of the usual data sets, and what is said of those that cannot be read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from registry.prompts.base import PROMPTS
from registry.prompts.dataset import File, Hub

DATA = Path(__file__).parent / "data" / "word_problems.jsonl"
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(*rows: Any, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return str(path)

    return write


def test_registered_names() -> None:
    assert (PROMPTS["file"], PROMPTS["hub"]) == (File, Hub)


def test_gsm8k_rows() -> None:
    source = File(str(DATA))
    assert len(source) == 12
    assert source[0] == {
        "prompt": "Mira packs 6 crates with 14 lemons each and gives 9 lemons away. How many lemons are left?",
        "answer": "She packs 6 * 14 = <<6*14=84>>84 lemons.\nShe has 84 - 9 = <<84-9=75>>75 left.\n#### 75",
    }
    assert [row["answer"].rpartition("#### ")[2] for row in source] == [
        "75", "1,234.50", "23", "-7", "1,350", "40", "1.5", "65%", "612", "19", "$155", "15",
    ]  # fmt: skip
    assert source[-1] == source[11]


def test_limit() -> None:
    source = File(str(DATA), limit=3)
    assert (len(source), len(list(source))) == (3, 3)
    assert source[-1] == File(str(DATA))[2]
    with pytest.raises(IndexError):
        source[3]
    assert len(File(str(DATA), limit=100)) == 12


CHAT = [{"role": "user", "content": "2 + 2?"}]
TEXT = {"type": "text", "text": "2?"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "2 + 2?", "answer": "4"}, {"prompt": "2 + 2?", "answer": "4"}),
        ({"prompt": CHAT, "answer": 4}, {"prompt": CHAT, "answer": 4}),
        ({"problem": "2 + 2?", "answer": "4", "level": 1}, {"prompt": "2 + 2?", "answer": "4", "level": 1}),
        ({"problem": "2 + 2?", "answer": "4", "solution": "s"}, {"prompt": "2 + 2?", "answer": "4", "solution": "s"}),
        (  # verl
            {"data_source": "gsm8k", "prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": "4"}},
            {
                "data_source": "gsm8k",
                "prompt": CHAT,
                "reward_model": {"style": "rule", "ground_truth": "4"},
                "answer": "4",
            },
        ),
        ({"messages": CHAT, "ground_truth": "4", "dataset": "d"}, {"prompt": CHAT, "answer": "4", "dataset": "d"}),
        (  # open-instruct with a reference completion, which must not be shown
            {"messages": [*CHAT, {"role": "assistant", "content": "4"}], "ground_truth": ["4"]},
            {"prompt": CHAT, "answer": "4"},
        ),
        (
            {"prompt": [{"role": "user", "content": "a", "name": None}], "answer": "4"},
            {"prompt": [{"role": "user", "content": "a"}], "answer": "4"},
        ),
        (  # OpenAI's parts
            {"prompt": [{"role": "user", "content": [TEXT | {"text": "2 + "}, TEXT]}], "answer": "4"},
            {"prompt": CHAT, "answer": "4"},
        ),
        (  # keeps away the one that a template has, and a reference completion is not read
            {
                "prompt": [{"role": "system", "content": ""}, *CHAT, {"role": "assistant", "content": None}],
                "answer": "4",
            },
            {"prompt": [{"role": "system", "content": ""}, *CHAT], "answer": "4"},
        ),
    ],
)
def test_layouts(write: Write, row: dict[str, Any], expected: dict[str, Any]) -> None:
    assert File(write(row))[0] == expected


def test_column_mapping(write: Write) -> None:
    row = {"query": "2 + 2?", "meta": {"result": "4", "hint": None}, "a.b": 1, "prompt": "not this"}
    columns = {"prompt": "query", "answer": "meta.result", "difficulty": "a.b"}
    assert File(write(row), columns=columns)[0] == {
        "prompt": "2 + 2?", "answer": "4", "difficulty": 1, "meta": {"result": "4", "hint": None}, "a.b": 1,
    }  # fmt: skip


def test_a_mapped_column_may_be_empty(write: Write) -> None:
    row = {"prompt": "2 + 2?", "answer": "4", "level": None}
    assert File(write(row), columns={"difficulty": "level"})[0]["difficulty"] is None


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_json_files(write: Write, name: str) -> None:
    rows = [{"prompt": "2 + 2?", "answer": "4"}, {"prompt": "é\u2028?", "answer": "5"}]
    assert [row["answer"] for row in File(write(*rows, name=name))] == ["4", "5"]
    assert [row["answer"] for row in File(write(json.dumps(rows, indent=1), name=name))] == ["4", "5"]
    assert [row["answer"] for row in File(write("\ufeff", *rows, "", name=name))] == ["4", "5"]


def test_lines_end_where_json_lines_do(write: Write) -> None:
    """U+2028 may stand in a JSON string; str.splitlines would cut the row there."""
    assert File(write('{"prompt": "a\u2028b", "answer": "4"}'))[0]["prompt"] == "a\u2028b"


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    row = {"data_source": "gsm8k", "prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": "4"}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 3), tmp_path / "rows.parquet")
    source = File(str(tmp_path / "rows.parquet"), limit=2)
    assert list(source) == [{**row, "answer": "4"}] * 2


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        ([], None, r"rows\.jsonl has no rows"),
        (["", " "], None, r"rows\.jsonl has no rows"),
        (
            [{"text": "a", "answer": "b"}],
            None,
            r"rows\.jsonl has no prompt column, only text, answer; set columns: {prompt: <one of them>}",
        ),
        (
            [{"prompt": "a", "result": "b"}],
            None,
            r"has no answer column, only prompt, result; set columns: {answer: <one of them>}",
        ),
        ([{"prompt": "a", "answer": "b"}], {"prompt": "query"},
            r"has no column 'query', only prompt, answer; set columns: {prompt:"),
        ([{"prompt": "a", "meta": {"x": 1}}], {"answer": "meta.y"},
            r"has no column 'meta\.y', only prompt, meta; meta has x; set columns: {answer: <one of them>}"),
        ([{"prompt": "a", "answer": 1, "meta": {"x": 1, "y": 2}}], {"level": "meta.z.u"}, "; meta has x, y; set"),
        ([{"prompt": "a", "answer": 1}], {"level": "answer.y"}, "'answer.y', only prompt, answer; set columns"),
        ([{"prompt": "a", "answer": "b"}, {"prompt": "a"}], None,
            r"line 2 of .*rows\.jsonl has no usable answer in column 'answer': None"),
        ([{"prompt": "a", "answer": "b"}, "", {"prompt": "a"}], None, r"line 3 of .*rows\.jsonl has no usable answer"),
        (['[{"prompt": "a", "answer": "b"},\n{"prompt": "a"}]'], None, r"row 2 of .*rows\.jsonl has no usable answer"),
        (['[\n\n{"prompt": " ", "answer": "b"}]'], None, r"row 1 of .*rows\.jsonl has no usable prompt"),
        ([{"prompt": "a", "answer": "b"}, {"answer": "b"}], None,
            r"line 2 of .* has no usable prompt in column 'prompt': None"),
        ([{"prompt": " ", "answer": "b"}], None, r"line 1 of .* has no usable prompt in column 'prompt': ' '"),
        ([{"prompt": [], "answer": "b"}], None, r"line 1 of .* has no usable prompt in column 'prompt': \[\]"),
        ([{"prompt": ["hi"], "answer": "b"}], None, r"line 1 of .* has no usable prompt in column 'prompt': \['hi'\]"),
        *(
            ([{"prompt": "a", "answer": "b"}, {"prompt": [{"role": "user", "content": content}], "answer": "b"}], None,
                r"line 2 of .* has no usable prompt in column 'prompt': \[{'role': 'user', 'content': ")
            for content in (
                None, "", " \n", [], 5, ["a"], [TEXT, {"type": "image", "text": "x"}], [{"type": "text"}], {"a": 1},
            )
        ),
        ([{"prompt": [{"role": "system", "content": None}, *CHAT], "answer": "b"}], None, "line 1 of .* no usable"),
        ([{"prompt": 5, "answer": "b"}], None, r"line 1 of .* has no usable prompt in column 'prompt': 5"),
        ([{"prompt": "a", "answer": "b"}, "{oops"], None, r"rows\.jsonl:2 is not JSON: .*; one object a line is"),
        (["[\n1,\noops]"], None, r"rows\.jsonl:3 is not JSON"),
        (["", '{"prompt": "a", "answer": ' + "9" * 5000 + "}"], None,
            r"rows\.jsonl:2 cannot be read: Exceeds the limit .* has 5000 digits; write the number as a text"),
        ([{"prompt": "\U0001f600 \\ud83d", "answer": "b"}, {"prompt": "\ud83d", "answer": "b"}], None,
            r"rows\.jsonl:2 holds '\\ud83d', which is half of a character"),
        ([json.dumps([{"prompt": "a", "answer": "b"}, {"prompt": "a", "answer": {"\udc00": 1}}])], None,
            r"rows\.jsonl:1, row 2, holds '\\udc00', which is half"),
        (["5"], None, r"rows\.jsonl:1 holds int, not an object"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read(write: Write, rows: list[Any], columns: dict[str, str] | None, message: str) -> None:
    source = File(write(*rows), columns=columns)
    with pytest.raises(ValueError, match=message):
        list(source)


def test_missing_and_unknown_files(tmp_path: Path, write: Write) -> None:
    source = File(str(tmp_path / "none.jsonl"))  # constructing is cheap: nothing is read yet
    with pytest.raises(ValueError, match=r"there is no file .*none\.jsonl \(looked in /.*\); correct path"):
        len(source)
    with pytest.raises(ValueError, match=r"rows\.csv: its name must end in \.jsonl, \.json or \.parquet"):
        len(File(write("a,b", name="rows.csv")))
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        File("rows.jsonl", limit=0)


def test_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own loader on a local folder, which it treats as a data set of the hub."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text(DATA.read_text())
    (folder / "test.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}))
    source = Hub(str(folder), limit=5)
    assert list(source) == list(File(str(DATA), limit=5))
    assert list(Hub(str(folder), split="test")) == [{"prompt": "1 + 1?", "answer": "#### 2"}]
    with pytest.raises(ValueError, match=r"set \(train\) has no column 'text', only question, answer; set col"):
        Hub(str(folder), columns={"prompt": "text"})[0]
    with pytest.raises(ValueError, match="dev"):
        len(Hub(str(folder), split="dev"))


def test_a_condition_on_a_field_that_is_not_there(write: Write) -> None:
    source = File(write({"prompt": "a", "answer": "b", "meta": {"level": 1}}), where={"meta.rank": 1})
    with pytest.raises(ValueError, match=r"no column 'meta\.rank', only prompt, answer, meta; meta has level; corr"):
        len(source)
