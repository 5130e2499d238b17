"""Reward for the right number."""

from collections.abc import Sequence

from registry.rewards.base import REWARDS, Verdict
from registry.rewards.numbers import parse_number
from registry.rewards.verifier import Verifier, verdict


@REWARDS.register("gsm8k")
class GSM8K(Verifier):
    """1 if the answer is exactly the number in the column ``answer`` (a GSM8K row ending in ``#### 18``, or the
    number), else 0.

    It abstains where ``answer`` holds no number: such a problem cannot be checked, so it is never paid.
    """

    def readable(self, gold: str) -> bool:
        return parse_number(gold) is not None

    def judge(self, golds: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        return [
            verdict(parse_number(answer) == parse_number(gold), answer, "number")
            for gold, answer in zip(golds, answers, strict=True)
        ]
