"""The usual data sets by short names: where they are on the hub, and how their rows are read."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from registry.prompts.base import PROMPTS
from registry.prompts.dataset import Hub, Table
from registry.prompts.files import read_file

LEVELS = (1, 2, 3, 4, 5)


class Preset(Hub):
    """A data set of the hub of which name, subset and split are known.

    Args:
        path: Read the same rows from here and not from the hub: a .jsonl, .json or .parquet file, or a local copy of
            the hub's folder.
        where: Only rows with these values; see :class:`Table`.
        limit: Only the first so many of them.
        revision: Commit on the hub.
    """

    hub: ClassVar[str]
    hub_subset: ClassVar[str | None] = None
    splits: ClassVar[tuple[str, ...]] = ("test",)
    """The splits on the hub; the first is the default."""

    def __init__(
        self,
        path: str | None = None,
        where: dict[str, Any] | None = None,
        limit: int | None = None,
        revision: str | None = None,
    ) -> None:
        super().__init__(self.hub, self.hub_subset, self.splits[0], revision, limit=limit, where=where)
        self.path = path
        if path is not None and Path(path).expanduser().is_dir():
            self.name = str(Path(path).expanduser())

    @property
    def from_file(self) -> bool:
        """Whether a single file holds the rows. A folder is read as the hub's would be."""
        return self.path is not None and self.name == self.hub

    @property
    def origin(self) -> str:
        return str(self.path) if self.from_file else super().origin

    def load(self) -> Sequence[Mapping[str, Any]]:
        return read_file(str(self.path)) if self.from_file else super().load()

    def _choose(self, split: str) -> None:
        if split not in self.splits:
            raise ValueError(f"{self.hub} has no split {split!r}; use one of {', '.join(self.splits)}")
        self.split = split

    def _choose_levels(self, levels: list[int] | None) -> None:
        if levels is not None and (not levels or not set(levels) <= set(LEVELS)):
            raise ValueError(f"levels {levels} should be a non-empty list of some of {list(LEVELS)}")
        self.levels = levels

    def conditions(self) -> dict[str, Any]:
        levels = getattr(self, "levels", None)
        return super().conditions() | ({"level": levels} if levels else {})


@PROMPTS.register("gsm8k")
class GSM8KProblems(Preset):
    """GSM8K, word problems of primary school; the answer is the number after ``####``.

    Args:
        split: train (7,473 rows) or test (1,319).
        common: path, where, limit and revision, as in :class:`Preset`.
    """

    hub, hub_subset, splits = "openai/gsm8k", "main", ("train", "test")

    def __init__(
        self,
        split: str = "train",
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self._choose(split)


@PROMPTS.register("math")
class MathProblems(Preset):
    """MATH with final answers, divided as in "Let's Verify Step by Step": its test split is MATH-500.

    Args:
        split: train (12,000 rows) or test (500).
        levels: Only these levels, 1 (easy) to 5.
        common: path, where, limit and revision, as in :class:`Preset`.
    """

    hub, splits = "nlile/hendrycks-MATH-benchmark", ("train", "test")

    def __init__(
        self,
        split: str = "train",
        levels: list[int] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self._choose(split)
        self._choose_levels(levels)


@PROMPTS.register("big_math")
class BigMath(Preset):
    """Big-Math as open-r1 processed it, in five levels of difficulty.

    Each row carries its ``level``; a file given as ``path`` must have that column where levels are chosen.

    Args:
        levels: Only these levels, 1 (easy) to 5. The paper takes 3 to 5, and 4 and 5. Default: all.
        common: path, where, limit and revision, as in :class:`Preset`.
    """

    hub, splits = "open-r1/Big-Math-RL-Verified-Processed", ("train",)
    answer_columns = (*Table.answer_columns, "solution")

    def __init__(
        self,
        levels: list[int] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self._choose_levels(levels)

    @property
    def origin(self) -> str:
        levels = ", ".join(f"level_{level}" for level in sorted(self.levels or LEVELS))
        return super().origin if self.from_file else f"{self.name} ({levels})"

    def load(self) -> Sequence[Mapping[str, Any]]:
        if self.from_file:
            return super().load()
        import datasets  # heavy

        parts = []
        for level in sorted(set(self.levels or LEVELS)):  # a subset each
            part = self.download(f"level_{level}")
            parts.append(part.add_column("level", [level] * len(part)))
        rows: Sequence[Mapping[str, Any]] = datasets.concatenate_datasets(parts)
        return rows

    def conditions(self) -> dict[str, Any]:
        return super().conditions() if self.from_file else self.where or {}  # other levels were not even downloaded


@PROMPTS.register("dapo_math")
class DapoMath(Preset):
    """DAPO-Math-17k: whole numbers as answers. On the hub, open-r1's copy: each problem once, without instructions.

    Rows of the original, as a file, hold each problem about a hundred times and ask for ``Answer: $Answer`` around
    it: the first of each counts, and the instruction is taken away, for the answer format gives its own.

    Args:
        language: en, cn, or all.
        keep_instruction: Leave the instruction of original rows in the prompt.
        common: path, where, limit and revision, as in :class:`Preset`.
    """

    hub, splits = "open-r1/DAPO-Math-17k-Processed", ("train",)
    answer_columns = (*Table.answer_columns, "solution")

    _BEFORE = re.compile(r"\s*Solve the following math problem step by step\.[^\n]*\n\s*")
    _AFTER = re.compile(r"\s*Remember to put your answer on its own line after [^\n]*\s*$")

    def __init__(
        self,
        language: str = "en",
        keep_instruction: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        if language not in ("en", "cn", "all"):
            raise ValueError(f"dapo_math has no language {language!r}; use en, cn or all")
        self.language, self.keep_instruction = language, keep_instruction
        self.subset = language

    @cached_property
    def _loaded(self) -> tuple[Sequence[Mapping[str, Any]], int]:
        """The rows, each problem once, and how many there were with its repetitions."""
        rows = super().load()
        if not self.from_file:
            return rows, len(rows)
        first: dict[str, Mapping[str, Any]] = {}
        for row in rows:
            first.setdefault(str(row.get("prompt")), row)
        return list(first.values()), len(rows)

    def load(self) -> Sequence[Mapping[str, Any]]:
        return self._loaded[0]

    def notes(self) -> list[str]:
        rows, everything = self._loaded
        repeated = [f"{everything - len(rows):,} of {everything:,} rows of {self.origin} repeat a problem: left out"]
        return repeated * (len(rows) < everything) + super().notes()

    def clean(self, prompt: Any) -> Any:
        if self.keep_instruction or prompt is None:
            return prompt
        if isinstance(prompt, str):
            return self._AFTER.sub("", self._BEFORE.sub("", prompt, count=1))
        return [message | {"content": self.clean(message["content"])} for message in prompt]


@PROMPTS.register("math_500")
class Math500(Preset):
    """MATH-500: 500 test problems of MATH, with ``level`` and ``subject``.

    Args:
        levels: Only these levels, 1 (easy) to 5.
        common: path, where, limit and revision, as in :class:`Preset`.
    """

    hub = "HuggingFaceH4/MATH-500"

    def __init__(
        self,
        levels: list[int] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self._choose_levels(levels)


@PROMPTS.register("aime_24")
class AIME24(Preset):
    """The 30 problems of AIME 2024; answers are whole numbers from 0 to 999. Arguments as in :class:`Preset`."""

    hub, splits = "HuggingFaceH4/aime_2024", ("train",)


@PROMPTS.register("aime_25")
class AIME25(Preset):
    """The 30 problems of AIME 2025; answers are whole numbers from 0 to 999. Arguments as in :class:`Preset`."""

    hub = "math-ai/aime25"


@PROMPTS.register("amc_23")
class AMC23(Preset):
    """40 problems of AMC 12 2023 with numbers as answers. Arguments as in :class:`Preset`."""

    hub = "math-ai/amc23"
