"""Reward for the right letter of a multiple choice question."""

from collections.abc import Sequence

from registry.rewards.answers.compare import normalised
from registry.rewards.answers.normalise import MAX_ANSWER
from registry.rewards.answers.words import choice_letter
from registry.rewards.base import REWARDS, Verdict
from registry.rewards.verifier import Verifier, verdict


def _letter(text: str) -> str | None:
    return choice_letter(normalised(text)) if len(text) <= MAX_ANSWER else None


@REWARDS.register("choice")
class Choice(Verifier):
    """1 if the answer states the letter in the column ``answer``, alone or with the option's text or a reason; ``A or
    B`` and ``A/B`` are no choice.
    """

    def readable(self, gold: str) -> bool:
        return _letter(gold) is not None

    def judge(self, golds: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        return [
            verdict(_letter(answer) == _letter(gold), answer, "choice")
            for gold, answer in zip(golds, answers, strict=True)
        ]
