"""Reward for length."""

from collections.abc import Sequence
from typing import Any, ClassVar

from registry.rewards.base import REWARDS, Reward


@REWARDS.register("length")
class Length(Reward):
    """DAPO's soft overlong punishment (arXiv 2503.14476, Eq. 13): 0 up to ``max_length`` - ``cache`` tokens, then
    linearly down to -1 at ``max_length``, and -1 beyond.

    Args:
        max_length: tokens at which the whole punishment is due; at most ``data.max_completion_length``.
        cache: tokens over which it grows.
        weight: of the reward in the sum.
    """

    maximum: ClassVar[float | None] = 0.0

    def __init__(self, max_length: int = 4096, cache: int = 1024, weight: float = 1.0) -> None:
        super().__init__(weight)
        if not 0 < cache <= max_length:
            raise ValueError(f"cache: {cache} must be above 0 and at most max_length: {max_length}")
        self.max_length, self.cache = max_length, cache

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | None]:
        free = self.max_length - self.cache
        return [-min(1.0, max(0, len(ids) - free) / self.cache) + 0.0 for ids in columns["completion_ids"]]
