"""Reward for the form alone."""

from collections.abc import Sequence
from typing import Any, ClassVar

from registry.rewards.base import REWARDS, Reward


@REWARDS.register("format")
class Format(Reward):
    """1 if the completion has the form that the prompt asks for, else 0. It ignores the answer: weigh it lightly."""

    maximum: ClassVar[float | None] = 1.0

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | None]:
        return [float(ok) for ok in columns["well_formed"]]
