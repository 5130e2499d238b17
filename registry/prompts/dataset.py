"""Prompts from files and from the Hugging Face hub, in the layouts of the usual data sets."""

import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from registry.prompts.base import PROMPTS, PromptSource

PROMPT_COLUMNS = ("prompt", "question", "problem", "messages")
ANSWER_COLUMNS = ("answer", "reward_model.ground_truth", "ground_truth")


def _get(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column, or of a field in it (``reward_model.ground_truth``); None if there is none."""
    value: Any = row
    for part in [column] if column in row else column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _messages(value: Any) -> str | list[dict[str, str]] | None:
    """A prompt as it should be: text, or chat messages that end before the assistant's turn; None if it is neither."""
    if isinstance(value, str):
        return value if value.strip() else None
    if not isinstance(value, Sequence) or not all(
        isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in value
    ):
        return None
    messages = [{"role": m["role"], "content": m["content"]} for m in value]
    if messages and messages[-1]["role"] == "assistant":
        messages.pop()  # open-instruct keeps a reference completion there: it would give the answer away
    return messages or None


class Table(PromptSource):
    """Rows with columns of any names, read as ``prompt``, ``answer`` and the rest.

    Understood as they are: ``prompt`` + ``answer``, GSM8K (``question``, ``answer`` ending in ``#### 18``), MATH-like
    (``problem``, ``answer``), verl (``prompt``, ``reward_model.ground_truth``) and open-instruct (``messages``,
    ``ground_truth``). ``columns`` maps our names to others: ``{prompt: query, answer: meta.result}``.
    """

    def __init__(self, columns: dict[str, str] | None = None, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}; leave it out to read all rows")
        self.columns, self.limit = columns, limit

    @property
    @abstractmethod
    def origin(self) -> str:
        """Where the rows come from, for messages."""

    @abstractmethod
    def load(self) -> Sequence[Mapping[str, Any]]:
        """All rows; called once, when the first is needed."""

    @cached_property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        rows = self.load()
        if not len(rows):
            raise ValueError(f"{self.origin} has no rows; give a data set with at least one")
        return rows

    @cached_property
    def mapping(self) -> dict[str, str]:
        """Our names -> theirs, judged by the first row."""
        first, mapping = self.rows[0], dict(self.columns or {})
        for ours, candidates in (("prompt", PROMPT_COLUMNS), ("answer", ANSWER_COLUMNS)):
            if ours not in mapping:
                mapping[ours] = next((c for c in candidates if _get(first, c) is not None), "")
        for ours, theirs in mapping.items():
            if theirs not in first and _get(first, theirs) is None:
                what = f"no column {theirs!r}" if theirs else f"no {ours} column"
                raise ValueError(
                    f"{self.origin} has {what}, only {', '.join(first)}; set columns: {{{ours}: <one of them>}}"
                )
        return mapping

    def __len__(self) -> int:
        return len(self.rows) if self.limit is None else min(self.limit, len(self.rows))

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row = self.rows[index % len(self)]
        values = {ours: _get(row, theirs) for ours, theirs in self.mapping.items()}
        values["prompt"] = _messages(values["prompt"])
        if isinstance(values["answer"], list) and len(values["answer"]) == 1:
            values["answer"] = values["answer"][0]
        for ours in ("prompt", "answer"):
            if values[ours] is None:
                raise ValueError(
                    f"row {index} of {self.origin} has no usable {ours} in column {self.mapping[ours]!r}: "
                    f"{_get(row, self.mapping[ours])!r}; mend or remove the row"
                )
        used = {theirs for ours, theirs in self.mapping.items() if ours in ("prompt", "answer")}
        return values | {name: value for name, value in row.items() if name not in used and name not in values}


@PROMPTS.register("file")
class File(Table):
    """Rows of a ``.jsonl``, ``.json`` (lines, or one array) or ``.parquet`` file."""

    def __init__(self, path: str, columns: dict[str, str] | None = None, limit: int | None = None) -> None:
        super().__init__(columns, limit)
        self.path = path

    @property
    def origin(self) -> str:
        return self.path

    def load(self) -> Sequence[Mapping[str, Any]]:
        path = Path(self.path).expanduser()
        if not path.is_file():
            raise ValueError(f"there is no file {self.path} (looked in {Path.cwd()}); correct path")
        if path.suffix == ".parquet":
            import pyarrow.parquet  # heavy

            rows: list[Mapping[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
            return rows
        if path.suffix not in (".jsonl", ".json"):
            raise ValueError(f"cannot read {self.path}: its name must end in .jsonl, .json or .parquet")
        text = path.read_text(encoding="utf-8-sig")
        return self._parse([(1, text)] if text.lstrip().startswith("[") else enumerate(text.split("\n"), start=1))

    def _parse(self, pieces: Iterable[tuple[int, str]]) -> list[Mapping[str, Any]]:
        rows: list[Mapping[str, Any]] = []
        for line, piece in pieces:
            if not piece.strip():
                continue
            try:
                value = json.loads(piece)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{self.path}:{line + error.lineno - 1} is not JSON: {error.msg}; one object a line is expected"
                ) from None
            for row in value if isinstance(value, list) else [value]:
                if not isinstance(row, Mapping):
                    raise ValueError(f"{self.path}:{line} holds {type(row).__name__}, not an object with columns")
                rows.append(row)
        return rows


@PROMPTS.register("hub")
class Hub(Table):
    """A data set of the Hugging Face hub, or a local folder of one."""

    def __init__(
        self,
        name: str,
        subset: str | None = None,
        split: str = "train",
        revision: str | None = None,
        columns: dict[str, str] | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(columns, limit)
        self.name, self.subset, self.split, self.revision = name, subset, split, revision

    @property
    def origin(self) -> str:
        return f"{self.name} ({', '.join(filter(None, [self.subset, self.split]))})"

    def load(self) -> Sequence[Mapping[str, Any]]:
        import datasets  # heavy

        rows: Sequence[Mapping[str, Any]] = datasets.load_dataset(
            self.name, self.subset, split=self.split, revision=self.revision
        )
        return rows
