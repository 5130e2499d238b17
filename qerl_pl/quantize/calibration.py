"""The texts that a model is calibrated and judged on: whole conversations, laid end to end in equal sequences."""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qerl_pl.chat import DATE
from qerl_pl.seeds import derive_seed
from registry.prompts import PROMPTS, Hub
from registry.prompts.dataset import PROMPT_COLUMNS
from registry.prompts.files import place, read_file, read_text

DEFAULT = "open-thoughts/OpenThoughts-114k"
"""The paper's."""
RESPONSE_COLUMNS = ("solution", "response", "completion", "output", "answer")
"""A row's worked solution is preferred to its bare answer."""
Content = str | list[dict[str, str]]
"""A text, or the messages of a conversation."""
_ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class Sequences:
    """Tokens of one purpose, and which texts of the shuffled source they came from."""

    tokens: list[list[int]]  # [N][length]
    texts: tuple[int, int]  # first and one past the last, in the shuffled order
    used: int  # texts among them, without those that recur

    @property
    def count(self) -> int:
        return sum(len(t) for t in self.tokens)


class Source:
    """The texts behind a name: a registered prompt source, a ``.txt`` (texts between empty lines), ``.jsonl``,
    ``.json`` or ``.parquet`` file, or a data set of the hub (owner/name), in an order that depends on ``seed`` alone.
    Its errors, and those of ``draw``, go behind the option that the name was given with.

    A row is ``text``, a conversation (``messages``; ``conversations`` and ``system``), or a prompt with its answer.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed = name, seed
        self.rows = _rows(name)
        generator = torch.Generator().manual_seed(derive_seed("calibration", seed))
        self.order = torch.randperm(len(self.rows), generator=generator).tolist()

    def conversations(self) -> Iterator[tuple[int, Content]]:
        """Position in the shuffled order and content. A text that recurs is left out: it would be on both sides."""
        seen: set[str] = set()
        for position, index in enumerate(self.order):
            content = conversation(self.rows[index], place(self.rows, index))
            if (key := str(content)) not in seen:
                seen.add(key)
                yield position, content


def _rows(name: str) -> Sequence[Mapping[str, Any]]:
    try:
        return _read(name)
    except ValueError as error:
        if not isinstance(error.__cause__, ConnectionError):
            raise
        raise ValueError(  # data sets of a run have other settings to read a file with
            f"cannot be reached ({error.__cause__}); download it, or give a .jsonl, .json, .parquet or .txt file of "
            "its texts"
        ) from error


def _read(name: str) -> Sequence[Mapping[str, Any]]:
    suffix = Path(name).suffix
    if suffix == ".txt":
        path = Path(name).expanduser()
        if not path.is_file():
            raise ValueError(f"there is no file {name} (looked in {Path.cwd()}); correct path")
        return [{"text": t.strip()} for t in read_text(name).split("\n\n") if t.strip()]
    if suffix in (".jsonl", ".json", ".parquet"):
        return read_file(name)
    if name.count("/") == 1 and not name.startswith((".", "~", "/")):
        rows: Sequence[Mapping[str, Any]] = Hub(name).load()
        return rows
    if "/" in name or suffix:
        raise ValueError(
            "neither a .txt, .jsonl, .json or .parquet file, nor a data set of the hub (owner/name), nor a registered "
            "prompt source; correct it"
        )
    return list(PROMPTS[name]())


def conversation(row: Mapping[str, Any], where: str) -> Content:
    """Plain text, or messages that end with the assistant's."""
    if isinstance(row.get("text"), str):
        return str(row["text"])
    for column in ("messages", "conversations"):
        if isinstance(row.get(column), Sequence):
            messages = [_message(m) for m in row[column]]
            system = row.get("system")
            if isinstance(system, str) and system and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": system})
            return messages
    prompt = next((row[c] for c in PROMPT_COLUMNS if row.get(c)), None)
    response = next((row[c] for c in RESPONSE_COLUMNS if row.get(c) is not None), None)
    if prompt is None or response is None:
        raise ValueError(
            f"{where} has the columns {', '.join(row)}; give text, messages, or a prompt "
            f"({', '.join(PROMPT_COLUMNS[:3])}) with its answer ({', '.join(RESPONSE_COLUMNS)})"
        )
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [_message(m) for m in prompt]
    return [*asked, {"role": "assistant", "content": str(response)}]


def _message(message: Mapping[str, Any]) -> dict[str, str]:
    """As chat templates want it; OpenThoughts and ShareGPT write from and value."""
    role = str(message.get("role") or message.get("from"))
    return {"role": _ROLES.get(role, role), "content": str(message.get("content") or message.get("value") or "")}


def encode(tokenizer: Any, content: Content, generate: bool = False) -> list[int]:
    """Token ids of a text, or of a conversation through the model's own template."""
    if isinstance(content, str):
        return list(tokenizer(content)["input_ids"])
    if tokenizer.chat_template is None:
        raise ValueError(
            "the model has no chat template for conversations; give plain text (column text, or a .txt file), or add "
            "chat_template.jinja to its folder"
        )
    text = tokenizer.apply_chat_template(
        content, tokenize=False, add_generation_prompt=generate, strftime_now=DATE.strftime
    )
    # The template writes the start token where there is one; the tokenizer must not write another.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def draw(
    tokenizer: Any, source: Source, wanted: Mapping[str, tuple[int, int]],
    options: str = "--num_samples, --held_out or --max_length",
) -> tuple[dict[str, Sequences], dict[str, list[Content]]]:  # fmt: skip
    """For each purpose, in order, so many sequences of so many tokens; and the contents each was made of. ``options``
    are what can be lowered if there is too little text.

    A sequence starts with the beginning of a text; texts follow one another until it is full, and what is left of the
    last is dropped. So long texts are truncated, short ones packed, and no text serves two purposes.

    Raises:
        ValueError: if the source ends before everything is full.
    """
    texts = source.conversations()
    drawn: dict[str, Sequences] = {}
    used: dict[str, list[Content]] = {}
    reached = 0
    for purpose, (count, length) in wanted.items():
        sequences: list[list[int]] = []
        contents: list[Content] = []
        tokens: list[int] = []
        first = reached
        while len(sequences) < count:
            position, content = next(texts, (None, ""))
            if position is None:
                have = sum(len(t) for t in sequences) + len(tokens)
                before = "".join(f", after {s.count:,} tokens for {p}" for p, s in drawn.items())
                raise ValueError(
                    f"it has {have:,} of {count:,} × {length:,} = {count * length:,} tokens for {purpose}{before} "
                    f"({len(source.order):,} rows); lower {options}, or give more text"
                )
            reached = position + 1
            contents.append(content)
            tokens += encode(tokenizer, content)
            if len(tokens) >= length:
                sequences.append(tokens[:length])
                tokens = []
        drawn[purpose], used[purpose] = Sequences(sequences, (first, reached), len(contents)), contents
    return drawn, used


def why_held_out(algorithm: str, same: bool) -> str:
    """Whether held-out texts calibrated, in words; ``same``: their shuffled order is that of the texts that did."""
    if algorithm == "rtn":
        return "and rounding calibrates on none"
    if same:
        return "drawn first in the shuffled order, so that no text of theirs calibrated"
    return "whether the checkpoint was calibrated on them is not known"


@dataclass(frozen=True)
class Texts:
    """What was drawn, and what the card says of it."""

    source: str
    seed: int
    sequences: Mapping[str, Sequences]
    prompts: list[list[int]]

    def calibration(self) -> dict[str, Any] | None:
        return self._said(self.sequences["calibration"]) if "calibration" in self.sequences else None

    def held_out(self, why: str) -> dict[str, Any]:
        return self._said(self.sequences["held_out"]) | {"why": why}

    def _said(self, drawn: Sequences) -> dict[str, Any]:
        return {
            "source": self.source, "seed": self.seed, "sequences": len(drawn.tokens),
            "length": len(drawn.tokens[0]), "tokens": drawn.count, "texts": drawn.used, "positions": list(drawn.texts),
        }  # fmt: skip


def draw_texts(base: Path, given: argparse.Namespace, num_samples: int, say: Callable[[str], None]) -> Texts:
    """Held-out sequences, prompts to sample from, and ``num_samples`` to calibrate on (0: none), checked against what
    the model knows. ``given`` is the command line, whose names errors give.
    """
    from transformers import AutoTokenizer

    longest = json.loads((base / "config.json").read_text()).get("max_position_embeddings")
    if longest is not None and given.max_length > longest:
        raise ValueError(
            f"--max_length {given.max_length} is more than the {longest} tokens that the model knows; "
            f"give --max_length {longest}"
        )
    tokenizer = AutoTokenizer.from_pretrained(base)
    wanted = {"held_out": (given.held_out, given.max_length)}
    if num_samples:
        wanted["calibration"] = (num_samples, given.max_length)
    try:
        sequences, contents = draw(tokenizer, Source(given.calibration, given.seed), wanted)
    except ValueError as error:
        raise ValueError(f"--calibration {given.calibration}: {error}") from error
    asked: list[Content] = [c[:-1] for c in contents["held_out"] if not isinstance(c, str) and len(c) > 1]
    encoded = [encode(tokenizer, c, generate=True) for c in asked]
    fitting = [p for p in encoded if len(p) + given.sample_tokens <= (longest or math.inf)]
    if len(fitting) < given.sample_prompts:
        say(
            f"{len(fitting)} held-out prompts to sample from, not {given.sample_prompts}: {len(encoded)} of the texts "
            f"have one, and with --sample_tokens {given.sample_tokens} it must fit into the model's {longest} tokens"
        )
    return Texts(given.calibration, given.seed, sequences, fitting[: given.sample_prompts])
