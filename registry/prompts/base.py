"""The interface of a prompt source."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Never

from registry._registry import Name, Registry


class PromptSource(ABC):
    """A sized, ordered set of problems.

    A row is a dict with ``prompt`` (a string, or chat messages) and any other columns, ``answer`` among them; rewards
    read those.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))

    def notes(self) -> list[str]:
        """What the user should know of these rows, such as how many a filter left out; told at the start of a run."""
        return []


PROMPTS: Registry[PromptSource] = Registry("prompt source", "qerl_pl.prompts")

if TYPE_CHECKING:
    PromptsName = Never
else:

    class PromptsName(Name, registry=PROMPTS):
        """A registered prompt source."""
