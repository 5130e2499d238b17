"""A plain function as a reward: what it is given, and what it may give back."""

import math
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from registry.rewards import PythonReward


def brevity(completions: list[str], **columns: Any) -> list[float | None]:
    return [1.0 / len(text) for text in completions]


def level_bonus(prompts: list[str], completions: list[str], level: list[int], scale: float = 0.5) -> list[float | None]:
    return [scale * value if value else None for value in level]


def needs_more(completions: list[str], solution: list[str]) -> list[float | None]:
    return [0.0 for _ in completions]


RETURNED: Any = None


def returns(completions: list[str]) -> Any:
    return RETURNED


def python_reward(name: str, **init: Any) -> PythonReward:
    return PythonReward(function=f"{__name__}.{name}", **init)


def test_python_reward() -> None:
    assert python_reward("brevity", weight=0.2).weight == 0.2
    assert python_reward("brevity").name == "brevity"
    assert python_reward("brevity")(["p", "p"], ["ab", "abcd"], answer=["1", "2"]) == [0.5, 0.25]


def test_python_reward_is_given_only_what_it_accepts() -> None:
    scores = python_reward("level_bonus")(
        ["p", "p"], ["c", "c"], level=[4, 0], answer=["1", "2"], extracted=[None, None]
    )
    assert scores == [2.0, None]


def test_python_reward_that_wants_a_missing_column() -> None:
    with pytest.raises(
        ValueError,
        match="needs_more needs solution, but there is only answer, completions, prompts; rename its arguments, map",
    ):
        python_reward("needs_more")(["p"], ["c"], answer=["1"])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "returns returned NoneType; return a list"),
        (1.0, "returns returned float; return a list"),
        ([1.0], "returns returned 1 scores for 2 completions"),
        ([1.0, 0.0, 1.0], "returns returned 3 scores for 2 completions"),
        ([1.0, "good"], "returns returned 'good' for completion 1; return a finite number, or None to abstain"),
        ([math.nan, 1.0], "returns returned nan for completion 0"),
        ([0.0, -math.inf], "returns returned -inf for completion 1"),
    ],
)
def test_python_reward_that_returns_nonsense(monkeypatch: pytest.MonkeyPatch, returned: Any, message: str) -> None:
    monkeypatch.setattr(sys.modules[__name__], "RETURNED", returned)
    with pytest.raises(ValueError, match=message):
        python_reward("returns")(["p", "p"], ["c", "c"])


def test_python_reward_may_return_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for returned in ([True, 0], (1, Fraction(0)), torch.tensor([1.0, 0.0])):
        monkeypatch.setattr(sys.modules[__name__], "RETURNED", returned)
        scores = python_reward("returns")(["p", "p"], ["c", "c"])
        assert scores == [1.0, 0.0]
        assert [type(s) for s in scores] == [float, float]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("brevity", "'brevity' cannot be imported .*; give the import path of a function"),
        ("no_such_module.f", "'no_such_module.f' cannot be imported .No module named 'no_such_module'.;"),
        ("math.no_such_function", "'math.no_such_function' cannot be imported .*no attribute 'no_such_function'.;"),
        ("math.pi", "'math.pi' is a float; give the import path of a function"),
        ("no_such_module.inner.f", "'no_such_module.inner.f' cannot be imported .No module named 'no_such_module'.;"),
        ("math.inner.f", "'math.inner.f' cannot be imported .No module named 'math.inner'; 'math' is not a package.;"),
        *((path, "it must have the form package.module.name") for path in ("", ".my.f", "my.f.", "my..f")),
    ],
)
def test_python_reward_that_cannot_be_found(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PythonReward(function=path)


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("import no_such_module", ModuleNotFoundError),
        ("from math import no_such_function", ImportError),
        ("import math; math.no_such_function", AttributeError),
        ("int('one')", ValueError),
    ],
)
def test_a_fault_inside_the_module_is_not_hidden(
    code: str, fault: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faulty_reward.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(fault) as caught:
        PythonReward(function="faulty_reward.f")
    assert str(caught.traceback[-1].path) == str(tmp_path / "faulty_reward.py")
