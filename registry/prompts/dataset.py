"""Prompts from files and from the Hugging Face hub, in the layouts of the usual data sets."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from registry.prompts.base import PROMPTS, PromptSource
from registry.prompts.files import place, read_file
from registry.prompts.where import checked, matches

PROMPT_COLUMNS = ("prompt", "question", "problem", "messages")
ANSWER_COLUMNS = ("answer", "reward_model.ground_truth", "ground_truth")


def _get(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column, or of a field in it (``reward_model.ground_truth``); None if there is none."""
    value: Any = row
    for part in [column] if column in row else column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _columns(row: Mapping[str, Any], missing: str) -> str:
    """What there is instead of a missing column: all columns, and the fields of the one that it begins with."""
    whole, _, _ = missing.partition(".")
    fields = row.get(whole)
    inside = f"; {whole} has {', '.join(fields)}" if isinstance(fields, Mapping) else ""
    return f"only {', '.join(row)}{inside}"


def _content(value: Any) -> str | None:
    """The text of a message; of a list of parts, as OpenAI has it, if all of them are text. None if it is no text."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        texts: list[Any] = [
            p.get("text") if isinstance(p, Mapping) and p.get("type") == "text" else None for p in value
        ]
        return "".join(texts) if all(isinstance(text, str) for text in texts) else None
    return value if isinstance(value, str) else None


def _messages(value: Any) -> str | list[dict[str, str]] | None:
    """A prompt as it should be: text, or chat messages that end before the assistant's turn; None if it is neither."""
    if isinstance(value, str):
        return value if value.strip() else None
    if not isinstance(value, Sequence) or not all(
        isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in value
    ):
        return None
    if value and value[-1]["role"] == "assistant":
        value = value[:-1]  # open-instruct keeps a reference completion there: it would give the answer away
    messages = []
    for role, content in ((m["role"], _content(m["content"])) for m in value):
        if content is None or not (content.strip() or role == "system"):  # an empty one keeps a template's own away
            return None
        messages.append({"role": role, "content": content})
    return messages or None


class Table(PromptSource):
    """Rows with columns of any names, read as ``prompt``, ``answer`` and the rest.

    Understood as they are: ``prompt`` + ``answer``, GSM8K (``question``, ``answer`` ending in ``#### 18``), MATH-like
    (``problem``, ``answer``), verl (``prompt``, ``reward_model.ground_truth``) and open-instruct (``messages``,
    ``ground_truth``).

    Args:
        columns: Our names for others: ``{prompt: query, answer: meta.result}``.
        limit: Only the first so many rows, of those that ``where`` keeps.
        where: Only rows with these values: ``{level: [3, 4, 5], subject: Algebra, solve_rate: {min: 0.1, max: 0.9}}``
            (one of a list, this one, a range with its ends). A column may be a list: one entry has to match.

    Raises:
        ValueError: if limit or a condition makes no sense; on reading, if there is no such column or no row is left.
    """

    answer_columns: ClassVar[tuple[str, ...]] = ANSWER_COLUMNS
    """Where the answer is looked for, unless ``columns`` names it."""

    def __init__(
        self, columns: dict[str, str] | None = None, limit: int | None = None, where: dict[str, Any] | None = None
    ) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}; leave it out to read all rows")
        self.columns, self.limit, self.where = columns, limit, checked(where)

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
        for ours, candidates in (("prompt", PROMPT_COLUMNS), ("answer", self.answer_columns)):
            if ours not in mapping:
                mapping[ours] = next((c for c in candidates if _get(first, c) is not None), "")
        for ours, theirs in mapping.items():
            if theirs not in first and _get(first, theirs) is None:
                what = f"no column {theirs!r}" if theirs else f"no {ours} column"
                raise ValueError(
                    f"{self.origin} has {what}, {_columns(first, theirs)}; set columns: {{{ours}: <one of them>}}"
                )
        return mapping

    def conditions(self) -> dict[str, Any]:
        """Which rows to keep, as in ``where``."""
        return self.where or {}

    @cached_property
    def kept(self) -> Sequence[int]:
        """The indices of the rows that meet all conditions."""
        conditions = {self.mapping.get(name, name): wanted for name, wanted in self.conditions().items()}
        if not conditions:
            return range(len(self.rows))
        kept, met = [], dict.fromkeys(conditions, False)
        for index, row in enumerate(self.rows):
            values = {name: _get(row, name) for name in conditions}
            met = {name: seen or values[name] is not None for name, seen in met.items()}
            if all(matches(values[name], wanted) for name, wanted in conditions.items()):
                kept.append(index)
        for name, seen in met.items():
            if not seen:
                raise ValueError(f"{self.origin} has no column {name!r}, {_columns(self.rows[0], name)}; correct where")
        if not kept:
            first = {name: _get(self.rows[0], name) for name in conditions}
            raise ValueError(
                f"no row of {self.origin} is {conditions}; the first of {len(self.rows)} is {first}; correct where"
            )
        return kept

    def notes(self) -> list[str]:
        conditions = self.conditions()
        if not conditions:
            return []
        shown = str(conditions).replace("'", "")  # as in YAML
        return [f"{len(self.kept):,} of {len(self.rows):,} rows of {self.origin} are {shown}"]

    def clean(self, prompt: Any) -> Any:
        """The prompt column as it should be read."""
        return prompt

    def __len__(self) -> int:
        return len(self.kept) if self.limit is None else min(self.limit, len(self.kept))

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index = self.kept[index % len(self)]
        row = self.rows[index]
        values = {ours: _get(row, theirs) for ours, theirs in self.mapping.items()}
        values["prompt"] = self.clean(_messages(values["prompt"]))
        if isinstance(values["answer"], list) and len(values["answer"]) == 1:
            values["answer"] = values["answer"][0]
        for ours in ("prompt", "answer"):
            if values[ours] is None:
                raise ValueError(
                    f"{place(self.rows, index)} of {self.origin} has no usable {ours} in column "
                    f"{self.mapping[ours]!r}: {_get(row, self.mapping[ours])!r}; mend or remove the row"
                )
        used = {theirs for ours, theirs in self.mapping.items() if ours in ("prompt", "answer")}
        return values | {name: value for name, value in row.items() if name not in used and name not in values}


@PROMPTS.register("file")
class File(Table):
    """Rows of a ``.jsonl``, ``.json`` (lines, or one array) or ``.parquet`` file; see :class:`Table`."""

    def __init__(
        self,
        path: str,
        columns: dict[str, str] | None = None,
        limit: int | None = None,
        where: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(columns, limit, where)
        self.path = path

    @property
    def origin(self) -> str:
        return self.path

    def load(self) -> Sequence[Mapping[str, Any]]:
        return read_file(self.path)


@PROMPTS.register("hub")
class Hub(Table):
    """A data set of the Hugging Face hub, or a local folder of one; see :class:`Table`."""

    def __init__(
        self,
        name: str,
        subset: str | None = None,
        split: str = "train",
        revision: str | None = None,
        columns: dict[str, str] | None = None,
        limit: int | None = None,
        where: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(columns, limit, where)
        self.name, self.subset, self.split, self.revision = name, subset, split, revision

    @property
    def origin(self) -> str:
        return f"{self.name} ({', '.join(filter(None, [self.subset, self.split]))})"

    def load(self) -> Sequence[Mapping[str, Any]]:
        return self.download(self.subset)

    def download(self, subset: str | None) -> Any:
        """One subset, as a ``datasets.Dataset``."""
        import datasets  # heavy

        try:
            return datasets.load_dataset(self.name, subset, split=self.split, revision=self.revision)
        except ConnectionError as error:
            raise ValueError(
                f"{self.origin} cannot be reached ({error}); download it beforehand, or read its rows from a file: "
                "data sets with a short name take path, others {class_path: file, init_args: {path: ...}}"
            ) from error
