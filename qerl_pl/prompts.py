"""Rows of a prompt source, rendered for an engine and dealt out in a fixed order."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from qerl_pl.chat import Chat
from qerl_pl.seeds import derive_seed
from qerl_pl.types import Prompt
from registry.prompts import PromptSource


def problem(row: dict[str, Any]) -> str:
    """What a row asks, without system messages, as one line: equal for problems that differ in white space alone."""
    content = row["prompt"]
    texts = [content] if isinstance(content, str) else [str(m["content"]) for m in content if m["role"] != "system"]
    return " ".join(" ".join(texts).split())


class Prompts(Sequence[Prompt]):
    """All rendered prompts of a source that are not longer than ``max_length`` tokens.

    ``problems`` has what each of them asks; ``notes`` says what was dropped, and what else the user should know.
    """

    def __init__(self, source: PromptSource, chat: Chat, max_length: int) -> None:
        self.problems: list[str] = []
        self._prompts: list[Prompt] = []
        lengths, own = [], 0
        for row in source:
            prompt = chat(row)
            lengths.append(len(prompt.token_ids))
            own += not isinstance(row["prompt"], str) and row["prompt"][0]["role"] == "system"
            if lengths[-1] <= max_length:
                self._prompts.append(prompt)
                self.problems.append(problem(row))
        if not self._prompts:
            raise ValueError(
                f"all {len(lengths)} prompts are longer than max_prompt_length {max_length}; "
                f"the shortest has {min(lengths, default=0)} tokens"
            )
        self.notes = source.notes()
        if dropped := len(lengths) - len(self):
            self.notes.append(
                f"{dropped:,} of {len(lengths):,} prompts are dropped as longer than max_prompt_length {max_length:,}; "
                f"the longest has {max(lengths):,} tokens"
            )
        if own and chat.answer_format.system_prompt.strip():
            self.notes.append(
                f"{own:,} of {len(lengths):,} rows bring a system prompt, which replaces that of the answer format"
            )
        if chat.merges:
            self.notes.append(
                "the chat template refuses a system role; the system prompt stands at the head of the user's message"
            )
        missing = [m for m in chat.answer_format.markers if not all(m in prompt.text for prompt in self)]
        if missing and chat.answer_format.system_prompt.strip():  # without one that is meant
            without = sum(any(m not in prompt.text for m in missing) for prompt in self)
            which = "the prompts" if without == len(self) else f"{without:,} of {len(self):,} prompts"
            self.notes.append(
                f"{which} do not mention {' and '.join(missing)}, where the answer is looked for: the data brings a "
                "system prompt of its own, or the chat template drops ours"
            )

    def drop(self, indices: Collection[int]) -> None:
        """Leave out some prompts."""
        gone = set(indices)
        kept = [i for i in range(len(self)) if i not in gone]
        self._prompts, self.problems = [self._prompts[i] for i in kept], [self.problems[i] for i in kept]

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: Any) -> Any:
        return self._prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)


def contamination(train: Iterable[str], held_out: Iterable[str], split: str) -> str | None:
    """A note if problems of a split are trained on."""
    learned, asked = set(train), list(held_out)
    common = [text for text in asked if text in learned]
    if not common:
        return None
    return (
        f"{len(common):,} of {len(asked):,} problems of data.{split} are training problems too, so what it measures "
        f"is partly memory: {_short(common[0])!r}"
    )


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def stream_index(position: int, size: int, seed: int) -> int:
    """Which of ``size`` prompts stands at ``position`` of an endless stream of permutations.

    It depends on nothing but its arguments, so a run resumes by its position alone.
    """
    epoch, offset = divmod(position, size)
    return int(_order(size, derive_seed(seed, "order", epoch))[offset])


@lru_cache(maxsize=2)  # a batch may reach into the next epoch
def _order(size: int, seed: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))
