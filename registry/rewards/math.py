"""Reward for the right mathematical answer."""

import re
from collections.abc import Sequence
from typing import Any

from registry.rewards.answers.compare import UndecidedError, compare, normalised
from registry.rewards.answers.normalise import MAX_ANSWER
from registry.rewards.base import REWARDS, Verdict
from registry.rewards.verifier import Verifier, verdict
from registry.rewards.workers import shared_pool

ALARM = 0.6  # of the timeout: a worker that hears it need not be killed
MAX_WORDS = 12  # of a gold: nobody hits a longer sentence


class _Ladder(Verifier):
    """Golds of any kind that ``compare`` knows."""

    def readable(self, gold: str) -> bool:
        if len(gold) > MAX_ANSWER or normalised(gold) in ("", "nan", "NaN"):
            return False
        return len(re.findall(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}", normalised(gold))) <= MAX_WORDS


@REWARDS.register("answer_tag")
class AnswerTag(_Ladder):
    """1 if the answer is that in the column ``answer`` by its text, its number or, item by item, its structure.

    For answers that are words, numbers, lists and pairs: algebra is left to ``math``.
    """

    def judge(self, golds: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        return [_plain(gold, answer) for gold, answer in zip(golds, answers, strict=True)]


def _plain(gold: str, answer: str) -> Verdict:
    try:
        return verdict(*_ordered(compare(gold, answer), answer))
    except UndecidedError:
        return verdict(False, answer, "not plain")


def _ordered(outcome: Any, answer: str) -> tuple[bool, str, str]:
    return outcome.right, answer, outcome.rule


@REWARDS.register("math")
class Math(_Ladder):
    """1 if the answer equals that in the column ``answer``, else 0: MATH, BigMath, DAPO-Math.

    Text, numbers and structure are compared at once; values of expressions in worker processes, which a hanging or
    crashing case loses. See docs/rewards.md.

    Args:
        weight: of the reward in the sum.
        workers: processes that compare expressions.
        timeout: seconds that one comparison may take; then the answer is wrong.
        memory: GiB that a worker may take.
    """

    def __init__(self, weight: float = 1.0, workers: int = 2, timeout: float = 5.0, memory: float = 2.0) -> None:
        super().__init__(weight)
        self.workers, self.timeout, self.memory = workers, timeout, memory
        self._pool = shared_pool("registry.rewards.answers.symbolic:case", workers, timeout, memory)

    def judge(self, golds: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        found: list[Verdict | None] = []
        for gold, answer in zip(golds, answers, strict=True):
            try:
                found.append(verdict(*_ordered(compare(gold, answer), answer)))
            except UndecidedError:
                found.append(None)
        hard = [i for i, known in enumerate(found) if known is None]
        cases = list(dict.fromkeys((golds[i], answers[i]) for i in hard))  # a group says the same thing many times
        alarm = self.timeout * ALARM
        done = dict(zip(cases, self._pool.run([(*case, alarm) for case in cases]), strict=True))
        for i in hard:
            status, value, ms = done[golds[i], answers[i]]
            if status == "ok" and value[1] == "alarm":
                found[i] = Verdict(0.0, "timeout", answers[i], "alarm", ms)
            elif status == "ok":
                found[i] = verdict(value[0], answers[i], value[1], ms)
            else:
                found[i] = Verdict(0.0, status, answers[i], "killed", ms)
        return [known for known in found if known is not None]
