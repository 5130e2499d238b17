"""Rows of files: JSON, lines of it, and parquet."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


class Lines(list[Mapping[str, Any]]):
    """Rows of a file of JSON lines, and the line of each, counted from 1; blank lines are no rows."""

    def __init__(self, rows: Iterable[Mapping[str, Any]], numbers: list[int]) -> None:
        super().__init__(rows)
        self.numbers = numbers


def place(rows: Sequence[Any], index: int) -> str:
    """How messages call a row: by the line of its file, as editors count, else by its number, from 1."""
    return f"line {rows.numbers[index]}" if isinstance(rows, Lines) else f"row {index + 1}"


def read_file(name: str) -> Sequence[Mapping[str, Any]]:
    """The rows of a ``.jsonl``, ``.json`` (lines, or one array) or ``.parquet`` file; ValueError if there are none."""
    path = Path(name).expanduser()
    if not path.is_file():
        raise ValueError(f"there is no file {name} (looked in {Path.cwd()}); correct path")
    if path.suffix == ".parquet":
        import pyarrow.parquet  # heavy

        try:
            rows: list[Mapping[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
        except (OSError, pyarrow.ArrowException) as error:
            said = str(error).rpartition("': ")[2]  # the file is named once
            raise ValueError(
                f"{name} cannot be read as parquet ({said}); it may be incomplete: copy or download it again"
            ) from error
        return rows
    if path.suffix not in (".jsonl", ".json"):
        raise ValueError(f"cannot read {name}: its name must end in .jsonl, .json or .parquet")
    text = read_text(name)
    if text.lstrip().startswith("["):
        return [row for _, row in _parse(name, [(1, text)])]
    found = list(_parse(name, enumerate(text.split("\n"), start=1)))
    return Lines([row for _, row in found], [line for line, _ in found])


def read_text(name: str) -> str:
    """A file as text, without the mark that some editors begin one with; ValueError if it is not UTF-8."""
    try:
        return Path(name).expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is no text in UTF-8 (byte {error.object[error.start]:#04x} at {error.start}); convert it, or name "
            "another file"
        ) from error


_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of a character beyond U+FFFF, as JSON escapes it: alone it is no text, and no tokenizer or file takes it."""


def _parse(name: str, pieces: Iterable[tuple[int, str]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The line that a piece begins at, and a row of it."""
    for line, piece in pieces:
        if not piece.strip():
            continue
        try:
            value = json.loads(piece)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{name}:{line + error.lineno - 1} is not JSON: {error.msg}; one object a line is expected"
            ) from None
        except ValueError as error:  # a number of more digits than Python reads
            said = str(error).partition(";")[0]
            raise ValueError(f"{name}:{line} cannot be read: {said}; write the number as a text, in quotes") from None
        escaped = _HALF.search(piece) is not None
        for number, row in enumerate(value if isinstance(value, list) else [value], start=1):
            where = f"{name}:{line}, row {number}," if isinstance(value, list) else f"{name}:{line}"
            if not isinstance(row, Mapping):
                raise ValueError(f"{where} holds {type(row).__name__}, not an object with columns")
            if escaped:
                _check_text(where, row)
            yield line, row


def _check_text(where: str, row: Mapping[str, Any]) -> None:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"{where} holds {half!r}, which is half of a character; mend or remove the row") from None
