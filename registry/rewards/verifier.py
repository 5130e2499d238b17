"""What rewards for right answers have in common."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from registry.rewards.answer_formats import gold_answer
from registry.rewards.answers.extract import last_box
from registry.rewards.base import Reward, Verdict


def verdict(right: bool, extracted: str | None, rule: str, ms: float = 0.0) -> Verdict:
    """Correct or wrong."""
    return Verdict(float(right), "correct" if right else "wrong", extracted, rule, ms)


def gold_text(answer: Any) -> str:
    """The right answer as text; empty if the column holds none."""
    if answer is None or isinstance(answer, list | dict) or (isinstance(answer, float) and not math.isfinite(answer)):
        return ""
    text = gold_answer(answer)
    box = last_box(text)  # a whole solution, as in MATH
    return box[2] if box else text


class Verifier(Reward):
    """1 for a right answer, else 0; it abstains where the gold cannot be checked, so that it is never paid."""

    maximum: ClassVar[float | None] = 1.0
    correctness: ClassVar[bool] = True

    @abstractmethod
    def readable(self, gold: str) -> bool:
        """Whether an answer can be checked against this gold."""

    @abstractmethod
    def judge(self, golds: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        """The verdict on each answer, where the gold is readable and there is an answer."""

    def check(self, golds: Sequence[Any], answers: Sequence[str | None]) -> list[Verdict]:
        """A verdict on each answer, in order. Golds are as in the data, answers as extracted."""
        texts = [gold_text(gold) for gold in golds]
        readable = {text: self.readable(text) for text in set(texts)}
        found: list[Verdict | None] = [
            Verdict(None, "unverifiable_gold", answer, "gold", 0.0) if not readable[gold]
            else Verdict(0.0, "no_answer", None, "", 0.0) if not (answer and answer.strip())
            else None
            for gold, answer in zip(texts, answers, strict=True)
        ]  # fmt: skip
        rest = [i for i, known in enumerate(found) if known is None]
        judged = self.judge([texts[i] for i in rest], [answers[i] or "" for i in rest])
        for i, result in zip(rest, judged, strict=True):
            found[i] = result
        return [result for result in found if result is not None]

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | None]:
        self.verdicts = self.check(self._golds(columns), columns["extracted"])
        return [result.reward for result in self.verdicts]

    def unverifiable(self, **columns: Sequence[Any]) -> list[int]:
        """Rows whose gold is not right when it is itself the answer."""
        golds = self._golds(columns)
        return [
            i
            for i, result in enumerate(self.check(golds, [gold_text(gold) for gold in golds]))
            if result.verdict != "correct"
        ]

    def _golds(self, columns: dict[str, Sequence[Any]]) -> Sequence[Any]:
        if "answer" not in columns:
            raise ValueError(
                f"{self.name} needs the column 'answer', the data has {sorted(columns)}; "
                "map it with columns: {answer: ...}"
            )
        return columns["answer"]
