"""The generated word problems, checked by reading their texts."""

import re
import subprocess
import sys
from itertools import pairwise

import pytest

from registry.prompts import PROMPTS, Arithmetic
from registry.prompts.arithmetic import Problem, split_of, worked_solution

GAINS, LOSSES = {"buys", "finds", "gets", "wins"}, {"donates", "drops", "loses", "sells"}
FIRST = re.compile(r"^[A-Z][a-z]+ has (\d+) (?:(?:bags|boxes|jars) of (\d+) )?[a-z]+(?:,| and)")
EVENT = re.compile(r"([a-z]+) (\d+)( more)?(?: and|\.)")
STEP = re.compile(r"^(\d+) ([-+*]) (\d+) = (\d+)$")


def read_story(text: str) -> list[int]:
    """All numbers a reader of the story gets to: the start, and the number after each event."""
    first = FIRST.match(text)
    assert first, text
    values = [int(first[1])]
    if first[2]:
        values.append(values[0] * int(first[2]))
    for verb, number, more in EVENT.findall(text[first.end() :]):
        assert verb in (GAINS if more else LOSSES)
        values.append(values[-1] + (int(number) if verb in GAINS else -int(number)))
    return values


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_story_solution_and_answer_agree(split: str) -> None:
    source = Arithmetic(split, size=500)
    for i, row in enumerate(source):
        told = read_story(row["prompt"])
        solution = worked_solution(source.problem(i))
        lines, answer = re.fullmatch(r"<think>(.+)</think><answer>(\d+)</answer>", solution).groups()
        worked = [STEP.match(line).groups() for line in lines.split(" ; ")]
        for a, operation, b, result in worked:
            assert int(result) == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operation]
        assert all(before[3] == after[0] for before, after in pairwise(worked))
        assert [int(worked[0][0]), *(int(step[3]) for step in worked)] == told
        assert row["answer"] == answer == str(told[-1])
        assert all(0 <= value <= 99 for value in told)
        assert len(worked) == {1: 1, 2: 2, 3: 2}[row["level"]]
        assert ("*" in solution) == (row["level"] == 3)


def test_worked_solution_by_hand() -> None:
    problem = Problem(2, "", 67, (("+", 17), ("-", 20)))
    assert worked_solution(problem) == "<think>67 + 17 = 84 ; 84 - 20 = 64</think><answer>64</answer>"
    slipped = worked_solution(problem, slip=lambda result: result + 1)
    assert slipped == "<think>67 + 17 = 85 ; 85 - 20 = 66</think><answer>66</answer>"


def test_splits_share_no_calculation() -> None:
    sources = {split: Arithmetic(split, size=1000) for split in ("train", "validation", "test")}
    prompts = {split: {row["prompt"] for row in source} for split, source in sources.items()}
    problems = {split: map(source.problem, range(len(source))) for split, source in sources.items()}
    calculations = {split: {(p.start, p.steps) for p in drawn} for split, drawn in problems.items()}
    for a, b in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert not prompts[a] & prompts[b]
        assert not calculations[a] & calculations[b]


def test_split_ignores_the_words() -> None:
    assert split_of(Problem(1, "one way", 5, (("+", 3),))) == split_of(Problem(1, "another", 5, (("+", 3),)))


def test_rows_depend_on_split_seed_and_index_only() -> None:
    rows = list(Arithmetic("test", size=50, seed=3))
    assert Arithmetic("test", size=10_000_000, seed=3)[49] == rows[49] == Arithmetic("test", size=50, seed=3)[-1]
    assert rows != list(Arithmetic("test", size=50, seed=4))
    code = "from registry.prompts import Arithmetic; print(Arithmetic('test', seed=3)[49]['prompt'])"
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert fresh.stdout.strip() == rows[49]["prompt"]  # another process, so another seed of hash()


def test_rows_never_change() -> None:
    """The embedded model's measured numbers refer to these rows."""
    assert Arithmetic("test", seed=0)[1] == {
        "prompt": "Felix has 59 books, wins 30 more and loses 88. How many books does Felix have now?",
        "answer": "1",
        "level": 2,
    }


def test_levels() -> None:
    assert {row["level"] for row in Arithmetic(size=100)} == {1, 2, 3}
    assert {row["level"] for row in Arithmetic(size=50, levels=[3, 1])} == {1, 3}
    shares = [sum(row["level"] == level for row in Arithmetic(size=3000)) for level in (1, 2, 3)]
    assert all(900 < share < 1100 for share in shares)  # 1000 ± 4 standard deviations


def test_bounds() -> None:
    source = Arithmetic(size=4)
    assert len(source) == len(list(source)) == 4
    with pytest.raises(IndexError):
        source[4]


def test_errors() -> None:
    with pytest.raises(ValueError, match="no split 'dev'; use one of train, validation, test"):
        Arithmetic("dev")
    for levels in ([], [4], [1, 0]):
        with pytest.raises(ValueError, match="levels"):
            Arithmetic(levels=levels)


def test_registered() -> None:
    assert PROMPTS["arithmetic"] is Arithmetic
