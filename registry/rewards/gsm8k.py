"""Reward for the right number."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar

from registry.rewards.answer_formats import gold_answer
from registry.rewards.base import REWARDS, Reward
from registry.rewards.numbers import parse_number


def _score(gold: Fraction | None, answer: str | None) -> float | None:
    if gold is None:
        return None
    return float(answer is not None and parse_number(answer) == gold)


@REWARDS.register("gsm8k")
class GSM8K(Reward):
    """1 if the answer is exactly the number in the column ``answer`` (a GSM8K row ending in ``#### 18``, or the
    number), else 0.

    It abstains where ``answer`` holds no number: such a problem cannot be checked, so it is never paid.
    """

    maximum: ClassVar[float | None] = 1.0
    correctness: ClassVar[bool] = True

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | None]:
        if "answer" not in columns:
            raise ValueError(
                f"gsm8k needs the column 'answer', the data has {sorted(columns)}; map it with columns: {{answer: ...}}"
            )
        golds = [parse_number(gold_answer(answer)) for answer in columns["answer"]]
        return [_score(gold, answer) for gold, answer in zip(golds, columns["extracted"], strict=True)]
