"""Reward for a text that matches a pattern."""

import re
from collections.abc import Sequence
from typing import Any

from registry.rewards.base import REWARDS, Reward, Verdict
from registry.rewards.workers import shared_pool


def case(arguments: list[str]) -> bool:
    """``[pattern, text]`` -> whether the pattern matches all of the text."""
    return re.fullmatch(arguments[0], arguments[1], re.DOTALL) is not None


@REWARDS.register("regex")
class Regex(Reward):
    r"""1 if ``pattern`` (of Python's ``re``, ``.`` is any character) matches all of the text, else 0.

    A pattern that takes forever on some text costs ``timeout``, not the run: it is matched in worker processes.

    Args:
        pattern: what to match; ``.*\b4[02]\b.*`` finds 40 or 42 anywhere.
        extracted: match the extracted answer, not the whole completion.
        weight: of the reward in the sum.
        timeout: seconds that one match may take; then the text does not match.
    """

    def __init__(self, pattern: str, extracted: bool = False, weight: float = 1.0, timeout: float = 1.0) -> None:
        super().__init__(weight)
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"pattern: {pattern!r} is not a regular expression: {error}") from error
        self.pattern, self.extracted, self.timeout = pattern, extracted, timeout
        self._pool = shared_pool("registry.rewards.regex:case", 2, timeout, 1.0)

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | None]:
        texts = columns["extracted"] if self.extracted else completions
        present = [i for i, text in enumerate(texts) if text is not None]
        found = [Verdict(0.0, "no_answer", None, "pattern", 0.0)] * len(texts)
        for i, (status, value, ms) in zip(
            present, self._pool.run([[self.pattern, texts[i]] for i in present]), strict=True
        ):
            name = ("correct" if value else "wrong") if status == "ok" else status
            found[i] = Verdict(float(status == "ok" and value), name, texts[i], "pattern", ms)
        self.verdicts = found
        return [result.reward for result in found]
