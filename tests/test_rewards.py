"""Rewards: what is paid, what is refused, and what stops a run before it earns nothing."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from qerl_pl.rewards import check_answer_format, reward_keys, score, verdict_rates
from qerl_pl.types import Completion, Prompt
from registry.rewards import (
    GSM8K,
    REWARDS,
    AnswerTag,
    Boxed,
    Choice,
    Format,
    Math,
    PythonReward,
    Regex,
    Reward,
    ThinkAnswer,
)
from registry.rewards import Length as LengthReward
from registry.rewards.answer_formats import AnswerFormat
from registry.rewards.base import checked_scores

ROWS = [json.loads(line) for line in (Path(__file__).parent / "data" / "word_problems.jsonl").read_text().splitlines()]


def prompt(answer: Any = "#### 4", **columns: Any) -> Prompt:
    return Prompt([1], "What is 2 + 2?", {"answer": answer, **columns})


def completion(text: str) -> Completion:
    return Completion([7, 8], [0.0, 0.0], text, True)


# ---- the rewards -----------------------------------------------------------------------------------------------------


def gsm8k(gold: Any, extracted: str | None) -> float | None:
    return GSM8K()(["p"], ["c"], answer=[gold], extracted=[extracted])[0]


@pytest.mark.parametrize(
    ("gold", "extracted", "paid"),
    [
        ("a = <<80+50=130>>130\n#### 130", "130", 1.0),
        ("#### 1,234", "$1234.00", 1.0),
        ("#### 50", "50%", 1.0),
        ("1/2", "0.5", 1.0),
        (72, "72", 1.0),
        (0.5, "1/2", 1.0),
        ("#### -5", "5", 0.0),
        ("#### 5", "25", 0.0),
        ("#### 5", "50", 0.0),
        ("#### 3.14", "33.14", 0.0),
        ("#### 9007199254740993", "9007199254740992", 0.0),  # equal as floats
        ("#### 5", "4 or 5", 0.0),
        ("#### 5", "", 0.0),
        ("#### 5", None, 0.0),
        ("a word", "a word", None),
        ("a word", None, None),
        ("#### 3 or 4", "3", None),
        ("", "", None),
        (None, "None", None),
        (float("nan"), "nan", None),
        (["5", "6"], "5", None),
    ],
)
def test_gsm8k(gold: Any, extracted: str | None, paid: float | None) -> None:
    assert gsm8k(gold, extracted) == paid


def test_gsm8k_rows() -> None:
    """Every row of the fixture pays its own answer and no other row's."""
    answers = ["75", "1234.5", "23", "-7", "1350", "40", "3/2", "65", "612", "19", "155", "15"]
    paid = [[gsm8k(row["answer"], answer) for answer in answers] for row in ROWS]
    assert paid == [[float(i == j) for j in range(12)] for i in range(12)]


def test_gsm8k_without_gold_column() -> None:
    with pytest.raises(
        ValueError, match=r"gsm8k needs the column 'answer', the data has \['extracted', 'level'\]; map it"
    ):
        GSM8K()(["p"], ["c"], extracted=["4"], level=[1])


def test_format() -> None:
    assert Format()(["p", "p"], ["c", "c"], well_formed=[True, False]) == [1.0, 0.0]


def test_names_and_weights() -> None:
    assert list(REWARDS) == ["answer_tag", "choice", "code", "format", "gsm8k", "length", "math", "python", "regex"]
    assert (REWARDS["format"], REWARDS["gsm8k"], REWARDS["python"]) == (Format, GSM8K, PythonReward)
    assert (GSM8K().name, GSM8K().weight, Format(weight=0.1).name, Format(weight=0.1).weight) == (
        "gsm8k",
        1.0,
        "format",
        0.1,
    )
    with pytest.raises(ValueError, match="weight of reward format must be finite, got nan"):
        Format(weight=math.nan)


class Length(Reward):
    """A user's class, not registered."""

    def __call__(self, prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
        return [float(len(ids)) for ids in columns["completion_ids"]]


def level_bonus(completions: list[str], level: list[int | None]) -> list[float | None]:
    return [None if value is None else value / 2 for value in level]


# ---- score -----------------------------------------------------------------------------------------------------------

GOOD, BARE, WRONG, CUT = (
    "<think>2 + 2</think><answer>4</answer>",
    "so <answer>4</answer>",
    "<think>2 + 2</think><answer>5</answer>",
    "<think>2 + 2 is <answer>4</answer>",
)


def test_score() -> None:
    rewards = [GSM8K(), Format(weight=0.1)]
    parts, totals = score(rewards, ThinkAnswer(), [prompt()] * 4, [completion(t) for t in (GOOD, BARE, WRONG, CUT)])
    assert parts == {"gsm8k": [1.0, 1.0, 0.0, 0.0], "format": [1.0, 0.0, 1.0, 0.0]}
    assert totals == pytest.approx([1.1, 1.0, 0.1, 0.0])


def test_score_of_abstentions() -> None:
    """Who abstains adds nothing; where all do there is no reward at all."""
    prompts = [prompt("#### 4"), prompt("unknown")]
    parts, totals = score([GSM8K(), Format(weight=0.1)], ThinkAnswer(), prompts, [completion(GOOD)] * 2)
    assert parts["gsm8k"] == [1.0, None]
    assert totals == pytest.approx([1.1, 0.1])
    parts, totals = score([GSM8K()], ThinkAnswer(), prompts, [completion(GOOD)] * 2)
    assert totals[0] == 1.0
    assert math.isnan(totals[1])


def test_score_passes_columns_of_all_rows() -> None:
    rewards = [PythonReward(f"{__name__}.level_bonus"), Length(weight=-0.5)]
    parts, totals = score(rewards, ThinkAnswer(), [prompt(level=2), prompt()], [completion(GOOD), completion(BARE)])
    assert parts == {"level_bonus": [1.0, None], "Length": [2.0, 2.0]}
    assert totals == [0.0, -1.0]


def test_each_completion_is_parsed_once() -> None:
    class Counting(ThinkAnswer):
        calls = 0

        def extract(self, completion: str) -> str | None:
            Counting.calls += 1
            return super().extract(completion)

    score([GSM8K(), GSM8K(), Format()], Counting(), [prompt()] * 3, [completion(GOOD)] * 3)
    assert Counting.calls == 3


def test_rewards_of_the_same_name_are_numbered() -> None:
    rewards = [Format(weight=0.1), GSM8K(), Format(weight=0.2), Format(weight=0.3)]
    assert reward_keys(rewards) == ["format", "gsm8k", "format_2", "format_3"]
    parts, totals = score(rewards, ThinkAnswer(), [prompt()], [completion(GOOD)])
    assert list(parts) == ["format", "gsm8k", "format_2", "format_3"]
    assert totals == pytest.approx([1.6])


def test_a_reward_that_is_only_logged_changes_no_total() -> None:
    """Also where the others abstain: a total of 0 would be compared with the group's."""
    prompts, completions = [prompt("#### 4"), prompt("unknown")], [completion(GOOD)] * 2
    parts, totals = score([GSM8K(), Format(weight=0)], ThinkAnswer(), prompts, completions)
    assert parts == {"gsm8k": [1.0, None], "format": [1.0, 1.0]}
    assert totals[0] == 1 and math.isnan(totals[1])


def test_scores_must_fit_into_fp32() -> None:
    assert checked_scores("mine", [3e38, None], 2) == [3e38, None]
    for value in (1e39, -1e39, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"mine returned .* for completion 0; return a finite number"):
            checked_scores("mine", [value], 1)


def test_verdict_rates() -> None:
    """Of the last score; rewards without verdicts have none."""
    rewards = [GSM8K(), Format(weight=0.1), GSM8K()]
    assert verdict_rates(rewards) == {}
    prompts = [prompt("#### 4"), prompt("unknown"), prompt("#### 4"), prompt("#### 4")]
    score(rewards, ThinkAnswer(), prompts, [completion(text) for text in (GOOD, GOOD, WRONG, CUT)])
    rates = {"correct": 0.25, "wrong": 0.25, "no_answer": 0.25, "unverifiable_gold": 0.25, "timeout": 0, "crash": 0}
    assert verdict_rates(rewards) == {
        f"{key}/{name}": rate for key in ("gsm8k", "gsm8k_2") for name, rate in rates.items()
    }


def test_verdicts_say_what_was_read_and_by_which_rule() -> None:
    reward = GSM8K()
    reward(["p"] * 2, ["c"] * 2, answer=["#### 4", None], extracted=["4.0", "4"])
    assert reward.verdicts == [(1.0, "correct", "4.0", "number", 0.0), (None, "unverifiable_gold", "4", "gold", 0.0)]


@pytest.mark.parametrize(
    ("reward", "golds", "never"),
    [
        (GSM8K(), ["#### 4", "four", "", None, "3 or 4", 5, float("nan")], [1, 2, 3, 4, 6]),
        (Choice(), ["A", "(B)", "A or B", "", "Apple", "C: with text"], [2, 3, 4]),
        (
            Math(),
            [r"\frac{1}{2}", "", "$", "x" * 2_000, "word " * 20, "word", None, ["1"], r"\boxed{3}"],
            [1, 2, 3, 4, 6, 7],
        ),
        (AnswerTag(), ["4", "", "(1,2)"], [1]),
    ],
)
def test_golds_that_can_never_be_earned(reward: Reward, golds: list[Any], never: list[int]) -> None:
    assert reward.unverifiable(answer=golds, level=[1] * len(golds)) == never
    scores = reward(["p"] * len(golds), ["c"] * len(golds), answer=golds, extracted=["4"] * len(golds))
    assert [i for i, score in enumerate(scores) if score is None] == never  # nor are they paid


def test_rewards_without_a_gold_have_no_bad_ones() -> None:
    assert Format().unverifiable(answer=["", None]) == []


@pytest.mark.parametrize(
    ("answer", "paid"),
    [("A", 1.0), ("(A)", 1.0), ("A: it is", 1.0), ("B", 0.0), ("A or B", 0.0), ("Apple", 0.0), (None, 0.0)],
)
def test_choice(answer: str | None, paid: float) -> None:
    assert Choice()(["p"], ["c"], answer=[r"\text{(A)}"], extracted=[answer]) == [paid]


def test_answer_tag_compares_structure_but_no_algebra() -> None:
    answers = ["2, 1.0", "1,2", "3,1", r"\sqrt{4}, 1"]
    assert AnswerTag()(["p"] * 4, ["c"] * 4, answer=["1, 2"] * 4, extracted=answers) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("tokens", "paid"), [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (30000, -1.0)]
)
def test_length_is_that_of_dapo(tokens: int, paid: float) -> None:
    """The numbers of the paper: 16,384 expected, 4,096 of cache."""
    reward = LengthReward(max_length=20480, cache=4096)
    assert reward(["p"], ["c"], completion_ids=[[7] * tokens]) == [pytest.approx(paid)]


def test_length_settings() -> None:
    with pytest.raises(ValueError, match="cache: 200 must be above 0 and at most max_length: 100"):
        LengthReward(max_length=100, cache=200)


def test_regex() -> None:
    assert Regex(r".*\b4[02]\b.*")(["p"] * 3, ["it is 42", "so\n40", "421"], extracted=[None] * 3) == [1.0, 1.0, 0.0]
    assert Regex("4[02]", extracted=True)(["p"] * 3, ["c"] * 3, extracted=["42", "x42", None]) == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"pattern: '\(' is not a regular expression"):
        Regex("(")


def test_score_mistakes() -> None:
    with pytest.raises(ValueError, match=r"there are no rewards.*set rewards: \[gsm8k\]"):
        score([], ThinkAnswer(), [prompt()], [completion(GOOD)])
    with pytest.raises(ValueError, match="1 prompts for 2 completions"):
        score([GSM8K()], ThinkAnswer(), [prompt()], [completion(GOOD)] * 2)
    with pytest.raises(ValueError, match=r"columns named \['extracted'\].*rename them in the data"):
        score([GSM8K()], ThinkAnswer(), [prompt(extracted="4")], [completion(GOOD)])

    class Bad(Reward):
        def __call__(self, prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
            return [math.nan]

    with pytest.raises(ValueError, match="reward Bad returned nan for completion 0"):
        score([Format(), Bad()], ThinkAnswer(), [prompt()], [completion(GOOD)])


# ---- the check at the start of a run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("answer_format", [ThinkAnswer(), Boxed()])
def test_check_passes_for_every_row(answer_format: AnswerFormat) -> None:
    for row in ROWS:
        check_answer_format(answer_format, [GSM8K(), Format(weight=0.1)], [prompt(row["answer"])])


class Hash(Boxed):
    """Asks for one form and reads another, as the published code did."""

    def render(self, reasoning: str, answer: str) -> str:
        return f"{reasoning}\n#### {answer}"


class Truncating(ThinkAnswer):
    """Reads the first character only."""

    def extract(self, completion: str) -> str | None:
        answer = super().extract(completion)
        return answer and answer[0]


def test_check_finds_a_format_that_the_rewards_do_not_read() -> None:
    with pytest.raises(
        ValueError, match=r"prompt and rewards disagree: gsm8k gives 0\.0 instead of 1\.0 to .*Hash reads None"
    ):
        check_answer_format(Hash(), [GSM8K()], [prompt()])
    with pytest.raises(ValueError, match=r"format gives 0\.0 instead of 1\.0"):
        check_answer_format(Hash(), [Format(weight=0.1)], [prompt()])
    check_answer_format(Truncating(), [GSM8K()], [prompt("#### 4")])
    with pytest.raises(ValueError, match=r"Truncating reads '4'; the gold answer is '#### 42'"):
        check_answer_format(Truncating(), [GSM8K()], [prompt("#### 42")])


def test_check_finds_a_gold_that_cannot_be_checked() -> None:
    with pytest.raises(ValueError, match=r"gsm8k abstains on the perfect completion .* the gold answer is 'blue'"):
        check_answer_format(ThinkAnswer(), [GSM8K(), Format()], [prompt("blue")])


def test_check_expects_nothing_of_rewards_with_unknown_maximum() -> None:
    check_answer_format(
        ThinkAnswer(), [PythonReward(f"{__name__}.level_bonus"), Length(), Format()], [Prompt([1], "Hi", {"level": 1})]
    )
