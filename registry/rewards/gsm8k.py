"""Reward for the right number."""

import re
from collections.abc import Sequence
from fractions import Fraction

from registry.rewards.answers.evaluate import tree
from registry.rewards.answers.exact import TooLargeError, UndefinedError, exact
from registry.rewards.answers.normalise import normalise
from registry.rewards.base import REWARDS, Verdict
from registry.rewards.numbers import MAX_CHARS, parse_number
from registry.rewards.verifier import Verifier, verdict

_CALCULATED = re.compile(r"<<[^<>]*>>")  # GSM8K's notes of a calculator
_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_TIMES = re.compile(r"(?<=\d)\s?[xX]\s?(?=\d)")


def stated(answer: str) -> Fraction | None:
    """The number of an answer, or the one at the end of true arithmetic: ``9*2 = 18``, ``Total = 4*5 = 20``."""
    number = parse_number(answer)
    if number is not None or "=" not in answer or len(answer) > MAX_CHARS:
        return number
    first, *rest = _CALCULATED.sub("", answer).split("=")
    number = parse_number(rest[-1])
    if len(rest) > 1 and re.fullmatch(r"[\sA-Za-z]+", first):
        sides = rest[:-1] if parse_number(f"{first} = {rest[-1]}") == number else []
    else:
        sides = [first, *rest[:-1]]
    return number if sides and all(number == _computed(side) for side in sides) else None


def _computed(text: str) -> Fraction | None:
    """The value of an arithmetic expression, within bounds."""
    node = tree(_TIMES.sub("*", _COMMA.sub("", normalise(text))))
    try:
        return None if node is None else exact(node)
    except (TooLargeError, UndefinedError, RecursionError):
        return None


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
            verdict(stated(answer) == parse_number(gold), answer, "number")
            for gold, answer in zip(golds, answers, strict=True)
        ]
