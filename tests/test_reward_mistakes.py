"""A user's reward that raises or cannot be called: which one, on which completion, and why."""

import json
from typing import Any

import pytest

from qerl_pl.datamodule import RolloutDataModule
from qerl_pl.rewards import check_signature, score
from qerl_pl.types import Completion, Prompt
from registry.rewards import GSM8K, PythonReward, Reward, ThinkAnswer

CALLS: list[int] = []


def divides(completions: list[str]) -> list[float]:
    CALLS.append(len(completions))
    return [1 / len(text) for text in completions]


def reads(completions: list[str]) -> list[float]:
    return [float(json.loads(text or "1")) for text in completions]


def together(completions: list[str]) -> list[float]:
    if len(completions) > 1:
        raise KeyError("level")
    return [0.0]


def in_fours(completions: list[str]) -> list[float]:
    assert len(completions) % 4 == 0, "groups"
    return [1 / len(text) for text in completions]


def scored(reward: Reward, texts: list[str], **columns: Any) -> list[float | None]:
    prompts = [Prompt("p", [1], {"answer": "4"} | columns) for _ in texts]
    parts, _ = score([reward], ThinkAnswer(), prompts, [Completion([1], [0.0], text, True) for text in texts])
    return next(iter(parts.values()))


def line_of(function: Any, place: int) -> int:
    return int(function.__code__.co_firstlineno) + place


@pytest.mark.parametrize(
    ("function", "texts", "said"),
    [
        (
            divides,
            ["a", "bc", "d", "e", "", "f", ""],
            f"reward divides failed on completion 4, '': ZeroDivisionError: division by zero "
            f"(test_reward_mistakes.py, line {line_of(divides, 2)}); mend it",
        ),
        (
            reads,
            ["1", "two"],
            f"reward reads failed on completion 1, 'two': JSONDecodeError: Expecting value: line 1 column 1 (char 0) "
            f"(test_reward_mistakes.py, line {line_of(reads, 1)}); mend it",
        ),
        (
            in_fours,
            ["a", "b", "c", "d", "e", "f", "g", ""],
            "reward in_fours failed on 8 completions: ZeroDivisionError",
        ),
        (together, ["1", "2", "3"], "reward together failed on 3 completions: KeyError: 'level' (test_reward_mis"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_reward_that_raises(function: Any, texts: list[str], said: str) -> None:
    CALLS.clear()
    with pytest.raises(ValueError, match=f"reward {function.__name__} failed on ") as caught:
        scored(PythonReward(f"{__name__}.{function.__name__}"), texts)
    assert str(caught.value).startswith(said)
    assert caught.value.__cause__ is not None  # what QERL_PL_DEBUG=1 shows
    if function is divides:
        assert CALLS == [7, 3, 2, 1, 1]  # all; 0 to 2; 3 and 4; 3; 4


def test_what_the_rewards_of_the_project_say_is_left_as_it_is() -> None:
    with pytest.raises(ValueError, match=r"^gsm8k needs the column 'answer'"):
        score([GSM8K()], ThinkAnswer(), [Prompt("p", [1], {})], [Completion([1], [0.0], "4", True)])


class Swapped(Reward):
    def __call__(self, completions, prompts, **columns):  # type: ignore[no-untyped-def, override]
        return [0.0 for _ in completions]


class Columns(Reward):
    def __call__(self, extracted, answer, **columns):  # type: ignore[no-untyped-def, override]
        return [0.0 for _ in extracted]


class OnlyAnswer(Reward):
    def __call__(self, prompts, completions, answer):  # type: ignore[no-untyped-def, override]
        return [0.0 for _ in completions]


class Level(Reward):
    """A column of its data; other names for the two that are given by place."""

    def __call__(self, questions, texts, /, *, level, **columns):  # type: ignore[no-untyped-def, override]
        return [float(value) for value in level]


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (Swapped, r"Swapped: __call__\(completions, prompts, \*\*columns\) .*prompts come first, then completions"),
        (Columns, r"Columns: __call__\(extracted, answer, \*\*columns\) .*multiple values for argument 'extracted'"),
        (OnlyAnswer, "OnlyAnswer: .*unexpected keyword argument 'extracted'"),
    ],
)
def test_a_signature_is_checked_when_the_run_is_made(cls: type[Reward], why: str) -> None:
    with pytest.raises(ValueError, match=rf"reward {why}.*; write def __call__\(self, prompts, completions, \*\*col"):
        RolloutDataModule(rewards=[GSM8K(), cls()])


class Stars(Reward):
    def __call__(self, *given, level, **columns):  # type: ignore[no-untyped-def, override]
        return [float(value) for value in level]


class NoColumns(Reward):
    """Of data that has none."""

    def __call__(self, prompts, completions, extracted, well_formed, completion_ids, finished):  # type: ignore[no-untyped-def, override]
        return [0.0 for _ in completions]


def test_a_signature_that_will_do() -> None:
    for reward in (Level(), Stars(), NoColumns()):
        check_signature(reward)
    assert scored(Stars(), ["a", "b"], level=3) == [3.0, 3.0]
    assert scored(Level(), ["a", "b"], level=3) == [3.0, 3.0]
    with pytest.raises(ValueError, match=r"reward Level failed on completion 0, 'a': TypeError: .*'level'; mend it"):
        scored(Level(), ["a", "b"])
