"""Several prompt sources as one."""

from bisect import bisect_right
from functools import cached_property
from itertools import accumulate
from typing import Any

from registry.prompts.base import PROMPTS, PromptsName, PromptSource


@PROMPTS.register("concat")
class Concat(PromptSource):
    """The rows of several sources, one source after the other. Training shuffles them; a column may be missing in some.

    Args:
        sources: at least one; ``[gsm8k, {class_path: math, init_args: {levels: [4, 5]}}]``.
    """

    def __init__(self, sources: list[PromptsName | PromptSource]) -> None:
        if not sources:
            raise ValueError("concat: sources is empty; name at least one, for example [gsm8k, math]")
        self.sources = sources

    @cached_property
    def ends(self) -> list[int]:
        """For each source, how many rows there are up to its last."""
        return list(accumulate(len(source) for source in self.sources))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]  # IndexError beyond the end
        which = bisect_right(self.ends, index)
        return self.sources[which][index - (self.ends[which - 1] if which else 0)]

    def notes(self) -> list[str]:
        return [note for source in self.sources for note in source.notes()]
