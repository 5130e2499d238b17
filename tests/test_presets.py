"""Data sets by name, the rows that conditions keep, and sources joined."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from registry.prompts import (
    AIME24,
    AMC23,
    PROMPTS,
    BigMath,
    Concat,
    DapoMath,
    File,
    GSM8KProblems,
    Hub,
    Math500,
    MathProblems,
    Preset,
    PromptsName,
    PromptSource,
)

WORDS = Path(__file__).parent / "data" / "word_problems.jsonl"
COPIES = os.environ.get("QERL_PL_TEST_DATA")  # a folder with gsm8k/train.jsonl and so on
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(*rows: dict[str, Any], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(json.dumps(row) for row in rows))
        return str(path)

    return write


# ---- where -----------------------------------------------------------------------------------------------------------

LEVELLED = [
    {"problem": "a", "answer": "1", "level": 1, "rate": 0.9, "domain": ["Algebra", "Sets"], "meta": {"kind": "x"}},
    {"problem": "b", "answer": "2", "level": "3", "rate": 0.5, "domain": ["Geometry"], "meta": {"kind": "y"}},
    {"problem": "c", "answer": "3", "level": 5.0, "rate": None, "domain": [], "meta": {"kind": "x"}},
    {"problem": "d", "answer": "4", "rate": "0.1", "domain": ["Algebra"], "meta": None},
]


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        (None, "abcd"),
        ({}, "abcd"),
        ({"level": 3}, "b"),
        ({"level": "1"}, "a"),
        ({"level": "3.0"}, "b"),
        ({"level": [3, 4, 5]}, "bc"),
        ({"level": {"min": 3}}, "bc"),
        ({"level": {"max": 4}}, "ab"),
        ({"rate": {"min": 0.1, "max": 0.5}}, "bd"),
        ({"domain": "Algebra"}, "ad"),
        ({"domain": ["Sets", "Geometry"]}, "ab"),
        ({"meta.kind": "x"}, "ac"),
        ({"meta.kind": "x", "level": {"max": 4}}, "a"),
        ({"answer": 2}, "b"),
        ({"prompt": ["a", "d"]}, "ad"),  # by our name for the column
    ],
)
def test_where(write: Write, where: dict[str, Any] | None, kept: str) -> None:
    source = File(write(*LEVELLED), where=where)
    assert "".join(row["prompt"] for row in source) == kept
    assert len(source) == len(kept)
    assert len(source.notes()) == bool(where)


def test_where_is_counted_and_comes_before_limit(write: Write) -> None:
    path = write(*LEVELLED)
    source = File(path, where={"level": [3, 5]}, limit=1)
    assert [row["prompt"] for row in source] == ["b"]
    assert source.notes() == [f"2 of 4 rows of {path} are {{level: [3, 5]}}"]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"lvl": 3}, r"rows\.jsonl has no column 'lvl', only problem, answer, level, .*; correct where"),
        ({"level": 4}, r"no row of .* is \{'level': 4\}; the first of 4 is \{'level': 1\}; correct where"),
        ({"level": []}, r"where: level: \[\] keeps no row"),
        ({"level": None}, r"where: level: None keeps no row"),
        ({"level": {}}, r"where: level: \{\} is no range; write \{min: 0\.1, max: 0\.9\}"),
        ({"level": {"low": 3}}, r"where: level: \{'low': 3\} is no range"),
        ({"level": {"min": "three"}}, r"where: level: \{'min': 'three'\} is no range"),
    ],
)
def test_conditions_that_make_no_sense(write: Write, where: dict[str, Any], message: str) -> None:
    path = write(*LEVELLED)
    with pytest.raises(ValueError, match=message):
        len(File(path, where=where))


# ---- presets ---------------------------------------------------------------------------------------------------------


def test_every_preset() -> None:
    where = {
        name: (cls.hub, cls.hub_subset, cls.splits) for name in PROMPTS if issubclass(cls := PROMPTS[name], Preset)
    }
    assert where == {
        "gsm8k": ("openai/gsm8k", "main", ("train", "test")),
        "math": ("nlile/hendrycks-MATH-benchmark", None, ("train", "test")),
        "big_math": ("open-r1/Big-Math-RL-Verified-Processed", None, ("train",)),
        "dapo_math": ("open-r1/DAPO-Math-17k-Processed", None, ("train",)),
        "math_500": ("HuggingFaceH4/MATH-500", None, ("test",)),
        "aime_24": ("HuggingFaceH4/aime_2024", None, ("train",)),
        "aime_25": ("math-ai/aime25", None, ("test",)),
        "amc_23": ("math-ai/amc23", None, ("test",)),
    }


def test_what_is_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[tuple[Any, ...]] = []

    def load(name: str, subset: str | None, split: str, revision: str | None) -> Any:
        asked.append((name, subset, split, revision))
        return datasets.Dataset.from_list([{"prompt": f"{subset}?", "solution": "7", "question": "?", "answer": "8"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert GSM8KProblems(split="test")[0]["answer"] == AIME24()[0]["answer"] == "8"
    assert len(MathProblems(revision="abc")) == 1
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: load(*a, **k).remove_columns(["question", "answer"]))
    assert DapoMath()[0] == {"prompt": "en?", "answer": "7"}
    assert list(BigMath(levels=[5, 3])) == [
        {"prompt": "level_3?", "answer": "7", "level": 3},
        {"prompt": "level_5?", "answer": "7", "level": 5},
    ]
    assert asked == [
        ("openai/gsm8k", "main", "test", None),
        ("HuggingFaceH4/aime_2024", None, "train", None),
        ("nlile/hendrycks-MATH-benchmark", None, "train", "abc"),
        ("open-r1/DAPO-Math-17k-Processed", "en", "train", None),
        ("open-r1/Big-Math-RL-Verified-Processed", "level_3", "train", None),
        ("open-r1/Big-Math-RL-Verified-Processed", "level_5", "train", None),
    ]


def test_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(ValueError, match=r"openai/gsm8k \(main, train\) cannot be reached .*short name take path"):
        len(GSM8KProblems())


def test_rows_from_a_file(write: Write) -> None:
    assert list(GSM8KProblems(path=str(WORDS), limit=3)) == list(File(str(WORDS), limit=3))
    with pytest.raises(ValueError, match=r"there is no file nowhere\.jsonl"):
        len(GSM8KProblems(path="nowhere.jsonl"))
    rows = [{"problem": "p", "solution": "so 3", "answer": "3", "level": level} for level in (1, 2, 3)]
    path = write(*rows)
    assert [row["level"] for row in Math500(path=path, levels=[2, 3])] == [2, 3]
    assert [row["level"] for row in MathProblems(path=path, levels=[1], where={"answer": 3})] == [1]
    assert BigMath(path=path, levels=[2]).notes() == [f"1 of 3 rows of {path} are {{level: [2]}}"]
    assert BigMath(path=path)[0]["answer"] == "3"  # the solution only where there is no answer
    path = write({"prompt": "p", "solution": "3"})
    assert BigMath(path=path)[0] == {"prompt": "p", "answer": "3"}
    with pytest.raises(ValueError, match="has no column 'level', only prompt, solution"):
        len(BigMath(path=path, levels=[4, 5]))


def test_rows_from_a_folder_like_the_hubs(tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for level in (3, 4):
        write({"prompt": f"p{level}", "solution": str(level)}, name=f"copy/level_{level}/train.jsonl")
    configs = "".join(f"- config_name: level_{i}\n  data_files: level_{i}/train.jsonl\n" for i in (3, 4))
    (tmp_path / "copy" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    source = BigMath(levels=[3, 4], path=str(tmp_path / "copy"))
    assert [(row["prompt"], row["answer"], row["level"]) for row in source] == [("p3", "3", 3), ("p4", "4", 4)]
    assert source.notes() == []


ASKED = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\nFind $x$.\n\nIt is {}.\n\nRemember to put "
    'your answer on its own line after "Answer:".'
)


def test_dapo_math_original_rows(write: Write) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": ASKED.format(kind)}],
            "reward_model": {"ground_truth": str(i), "style": "rule"},
        }
        for i, kind in enumerate(("odd", "even", "odd"))
    ]
    path = write(*rows)
    source = DapoMath(path=path)
    assert [(row["prompt"], row["answer"]) for row in source] == [
        ([{"role": "user", "content": "Find $x$.\n\nIt is odd."}], "0"),
        ([{"role": "user", "content": "Find $x$.\n\nIt is even."}], "1"),
    ]
    assert source.notes() == [f"1 of 3 rows of {path} repeat a problem: left out"]
    assert DapoMath(path=path, keep_instruction=True)[1]["prompt"][0]["content"] == ASKED.format("even")
    path = write({"prompt": "Find $x$.\nRemember that it is odd.", "solution": "3"})
    assert DapoMath(path=path)[0] == {"prompt": "Find $x$.\nRemember that it is odd.", "answer": "3"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GSM8KProblems(split="validation"), "openai/gsm8k has no split 'validation'; use one of train, test"),
        (lambda: BigMath(levels=[6]), r"levels \[6\] should be a non-empty list of some of \[1, 2, 3, 4, 5\]"),
        (lambda: MathProblems(levels=[]), r"levels \[\] should be"),
        (lambda: DapoMath(language="de"), "dapo_math has no language 'de'; use en, cn or all"),
        (lambda: AMC23(limit=0), "limit must be at least 1"),
        (lambda: Concat([]), "concat: sources is empty"),
    ],
)
def test_settings_that_make_no_sense(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---- concat ----------------------------------------------------------------------------------------------------------


def test_concat(write: Write) -> None:
    levelled = File(write(*LEVELLED), where={"level": [3, 5]})
    source = Concat([levelled, File(str(WORDS)), levelled])
    assert len(source) == 2 + 12 + 2
    assert [row["answer"] for row in source] == ["2", "3", *(row["answer"] for row in File(str(WORDS))), "2", "3"]
    assert source[-1]["answer"] == "3"
    with pytest.raises(IndexError):
        source[16]
    assert source.notes() == levelled.notes() * 2


# ---- as a config says it ---------------------------------------------------------------------------------------------


class Data:
    def __init__(self, train: PromptSource | PromptsName = GSM8KProblems(split="train")) -> None:
        self.train = train


def read(value: str) -> Any:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Data, "data")
    config = parser.parse_args([f"--data.train={value}"] if value else [])
    assert parser.dump(parser.parse_string(parser.dump(config))) == parser.dump(config)
    make = getattr(parser, "instantiate", None) or parser.instantiate_classes
    return make(config).data.train


def test_configs() -> None:
    assert isinstance(read(""), GSM8KProblems) and read("").split == "train"
    assert type(read("gsm8k")) is GSM8KProblems
    train = read("{class_path: big_math, init_args: {levels: [3, 4, 5], where: {rate: {min: 0.1, max: 0.9}}}}")
    assert (type(train), train.levels, train.where) == (BigMath, [3, 4, 5], {"rate": {"min": 0.1, "max": 0.9}})
    train = read("{class_path: hub, init_args: {name: a/b, where: {subject: [Algebra, Geometry], level: 3}}}")
    assert (type(train), train.where) == (Hub, {"subject": ["Algebra", "Geometry"], "level": 3})
    train = read("{class_path: concat, init_args: {sources: [gsm8k, {class_path: math, init_args: {levels: [5]}}]}}")
    assert [type(source) for source in train.sources] == [GSM8KProblems, MathProblems]
    assert train.sources[1].levels == [5]
    for name in ("math_500", "aime_24", "aime_25", "amc_23", "dapo_math"):
        assert type(read(name)) is PROMPTS[name]


# ---- the sets themselves, where there is a copy ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "file", "rows"),
    [
        ("gsm8k", "gsm8k/train.jsonl", 7473),
        ("gsm8k", "gsm8k/test.jsonl", 1319),
        ("math_500", "math500/test.jsonl", 500),
        ("aime_24", "aime24/test.jsonl", 30),
        ("aime_25", "aime25/test.jsonl", 30),
        ("amc_23", "amc23/test.jsonl", 40),
    ],
)
def test_copies(name: str, file: str, rows: int) -> None:
    if not COPIES or not (Path(COPIES) / file).is_file():
        pytest.skip(f"needs a copy of {name} in the folder that QERL_PL_TEST_DATA names")
    source = PROMPTS[name](path=str(Path(COPIES) / file))  # type: ignore[call-arg]
    assert len(source) == rows
    assert all(row["prompt"] and str(row["answer"]) for row in source)
