"""Rows of a prompt source, rendered for an engine and dealt out in a fixed order."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from qerl_pl.seeds import derive_seed
from qerl_pl.types import Prompt
from registry.prompts import PromptSource
from registry.rewards import AnswerFormat


def render(row: dict[str, Any], answer_format: AnswerFormat, tokenizer: Any) -> Prompt:
    """A row as a chat: the format's system prompt (unless the row brings one), then its messages."""
    content = row["prompt"]
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
    if answer_format.system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": answer_format.system_prompt}, *messages]
    if tokenizer.chat_template is None:
        raise ValueError(
            "the model has no chat template; name an instruct model, or add chat_template.jinja to its folder"
        )
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Prompt(list(token_ids), text, {k: v for k, v in row.items() if k != "prompt"})


class Prompts(Sequence[Prompt]):
    """All rendered prompts of a source that are not longer than ``max_length`` tokens."""

    def __init__(self, source: PromptSource, answer_format: AnswerFormat, tokenizer: Any, max_length: int) -> None:
        everything = [render(row, answer_format, tokenizer) for row in source]
        self._prompts = [p for p in everything if len(p.token_ids) <= max_length]
        self.dropped = len(everything) - len(self._prompts)
        if not self._prompts:
            shortest = min((len(p.token_ids) for p in everything), default=0)
            raise ValueError(
                f"all {len(everything)} prompts are longer than max_prompt_length {max_length}; "
                f"the shortest has {shortest} tokens"
            )

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: Any) -> Any:
        return self._prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)


def stream_index(position: int, size: int, seed: int) -> int:
    """Which of ``size`` prompts stands at ``position`` of an endless stream of permutations.

    It depends on nothing but its arguments, so a run resumes by its position alone.
    """
    epoch, offset = divmod(position, size)
    return int(_order(size, derive_seed(seed, "order", epoch))[offset])


@lru_cache(maxsize=2)  # a batch may reach into the next epoch
def _order(size: int, seed: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))
