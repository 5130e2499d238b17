"""Rows of a measurement: collected, printed as a table, and merged into a JSON file."""

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from qerl_pl import gpu_memory
from qerl_pl.bench.machine import describe
from qerl_pl.memory import GB

IDENTITY = (
    "bench", "model", "format", "variant", "rank", "batch", "phase", "checkpointing", "tokens", "prompts",
    "generations", "prompt_length", "completion_length", "config", "options", "memory_gb", "budget_gb",
)  # fmt: skip
"""What tells one row from another; all else is measured."""


class Results:
    """The rows of one call. The file is written after each, so that a call that is cut short leaves what it had.

    In the file, each entry of ``runs`` says where and how a call was made, and each row the number of its run.
    """

    def __init__(self, bench: str, output: Path | None, commit: str | None = None) -> None:
        self.bench, self.output = bench, output
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []
        old = _read(output) if output is not None and output.is_file() else {"runs": [], "rows": []}
        self._old: list[dict[str, Any]] = old["rows"]
        run = describe(commit) if output is not None else {}
        self._runs: list[dict[str, Any]] = [*old["runs"], run]

    def add(self, what: dict[str, Any], measured: dict[str, Any]) -> None:
        """``what`` was measured, by keys of ``IDENTITY``; None stands for what does not apply."""
        assert not what.keys() - set(IDENTITY)
        what = {"bench": self.bench} | {key: value for key, value in what.items() if value is not None}
        values = {key: _short(value) for key, value in measured.items()}
        self.rows.append({**what, **values, "run": len(self._runs) - 1})
        print(_line({**what, **values}), flush=True)
        if self.output is not None:
            rows = [row for row in self._old if not any(_replaces(new, row) for new in self.rows)] + self.rows
            self.output.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.output.with_name(f".{self.output.name}.new")
            unfinished.write_text(json.dumps({**self._runs[-1], "runs": self._runs, "rows": rows}, indent=1) + "\n")
            unfinished.replace(self.output)

    @contextmanager
    def candidate(self, what: dict[str, Any]) -> Iterator[None]:
        """One of several candidates: if it fails, that is its row, and the others are still measured."""
        print(_line(what) + " ...", flush=True)  # an engine starts for a minute without a word
        try:
            yield
        except torch.OutOfMemoryError:
            self.add(what, {"error": "out of memory"})
        except Exception as error:  # a peer may raise anything
            import traceback

            traceback.print_exc()
            message = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self.add(what, {"error": message})
            self.failed.append(message)
        free_memory()

    def finish(self) -> None:
        """Print the table. RuntimeError if a candidate failed otherwise than for want of memory."""
        print("\n" + table(self.rows))
        if self.failed:
            raise RuntimeError(f"bench {self.bench}: {len(self.failed)} candidates failed, first: {self.failed[0]}")


def _read(output: Path) -> dict[str, Any]:
    """The file of an earlier call; ValueError if it is another."""
    try:
        old: dict[str, Any] = json.loads(output.read_text())
        if isinstance(old["runs"], list) and isinstance(old["rows"], list):
            return old
    except (ValueError, LookupError, TypeError):  # no text, no JSON, or another
        pass
    raise ValueError(f"--output {output} holds no runs and rows; name another file, or remove it")


def _line(row: dict[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in row.items() if v is not None and not isinstance(v, dict | list))


def _replaces(new: dict[str, Any], old: dict[str, Any]) -> bool:
    """Whether both measure the same. A candidate that failed has one row for all its batches or phases, and what was
    measured of it before is kept.
    """
    if "error" in new and "error" not in old:
        return False
    keys = [key for key in IDENTITY if key in old or "error" not in old]
    return all(new.get(key) == old.get(key) for key in keys)


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows in Markdown: the columns that any of them has, but not those that hold one and the same of ``IDENTITY``."""
    rows = [{key: _cell(row, key) for key in row if not key.endswith(("_min", "_max"))} for row in rows]
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in ("bench", "run")]
    same = {key for key in IDENTITY if key != "model" and len({row.get(key) for row in rows}) == 1 and len(rows) > 1}
    columns = [key for key in columns if key not in same]
    lines = [columns, ["---"] * len(columns)]
    lines += [[row.get(key, "") for key in columns] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def _cell(row: dict[str, Any], key: str) -> str:
    extremes = f" ({row[f'{key}_min']:g}-{row[f'{key}_max']:g})" if f"{key}_min" in row else ""
    return f"{row[key]:g}{extremes}" if isinstance(row[key], float) else f"{row[key]}{extremes}"


def names(text: str) -> list[str]:
    """``"7B,14B"`` -> ["7B", "14B"]."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise ValueError(f"{text!r} names nothing; separate several by commas")
    return found


def numbers(text: str) -> list[int]:
    """``"1,2,8"`` -> [1, 2, 8]."""
    try:
        return [int(part) for part in names(text)]
    except ValueError as error:
        raise ValueError(f"{text!r} is not a list of integers such as 1,2,8") from error


def choices(option: str, text: str, known: Sequence[str]) -> list[str]:
    """``names(text)``, each of them one of ``known``."""
    found = names(text)
    if unknown := [name for name in found if name not in known]:
        raise ValueError(f"--{option}: unknown {', '.join(unknown)}; choose from {', '.join(known)}")
    return found


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def check_repeats(repeats: int) -> None:
    if repeats < 1:
        raise ValueError(f"--repeats: {repeats} must be at least 1")


def seconds(call: Callable[[], Any], repeats: int, warm_up: int = 1) -> list[float]:
    """Wall time of each call, the warm-up left out."""
    check_repeats(repeats)
    times = []
    for _ in range(warm_up + repeats):
        synchronize()
        began = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - began)
    return times[warm_up:]


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median under ``name``, and the extremes."""
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def limit_memory(memory_gb: float | None) -> None:
    """Let PyTorch take at most this much of the GPU's memory, as on a smaller card."""
    if memory_gb is None:
        return
    if not torch.cuda.is_available():
        raise ValueError(f"--memory_gb {memory_gb} bounds the memory of a GPU, and there is none; leave it out")
    gpu_memory.limit_memory(int(memory_gb * GB))


def peak() -> dict[str, float]:
    """Largest memory that PyTorch held on the GPU since the last ``free_memory``."""
    return {"peak_gb": torch.cuda.max_memory_allocated() / 1e9} if torch.cuda.is_available() else {}


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def device() -> tuple[str, str]:
    """(device, dtype of the arithmetic) of all measurements."""
    return ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")
