"""``qerl-pl verify``: scores rows of gold and response, so that users can check their golds before a run."""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry._import import ImportPathError, import_path
from registry.rewards import REWARDS, VERDICTS, AnswerFormat, AnswerTag, Choice, Math, Stated, ThinkAnswer, Verifier
from registry.rewards.gsm8k import GSM8K

TASKS = {"gsm8k": GSM8K, "math": Math, "mcq": Choice, "choice": Choice, "answer_tag": AnswerTag}


@dataclass(frozen=True)
class Row:
    """A line of the file with its verdict."""

    line: int
    kind: str
    expected: bool | None
    debatable: bool
    verdict: str
    extracted: str | None
    rule: str
    gold: str

    @property
    def right(self) -> bool:
        return self.expected is not None and (self.verdict == "correct") == self.expected


def verify(args: Sequence[str]) -> int:
    """Prints a table by kind; returns 1 if a row that is not debatable is not as expected, else 0."""
    parser = argparse.ArgumentParser("qerl-pl verify", description="Score rows of gold and response.")
    parser.add_argument(
        "file", type=Path, help="JSON lines with gold and response; also expected (is it right?), kind, task"
    )
    parser.add_argument(
        "--reward", help=f"{', '.join(verifiers())}, or the import path of a Verifier; else the task of each row"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes that compare expressions")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds of one comparison")
    parser.add_argument("--wrong", action="store_true", help="also print the rows that are not as expected")
    given = parser.parse_args(args)
    rows = score_rows(read(given.file), given.reward, given.workers, given.timeout)
    print("\n".join(table(rows, given.wrong)))
    return int(any(not row.right and not row.debatable for row in rows if row.expected is not None))


def verifiers() -> list[str]:
    """Names of the rewards that check an answer against a gold."""
    return [name for name in REWARDS if issubclass(REWARDS[name], Verifier)]


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines; ValueError names the first line that is none."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number} is not JSON ({error}); give one JSON object a line") from error
        if not isinstance(row, dict) or not row.keys() >= {"gold", "response"}:
            raise ValueError(f"{path}:{number} needs the keys gold and response; rename the columns of your file")
        if not isinstance(row.get("response"), str):
            raise ValueError(f"{path}:{number}: response is {row['response']!r}; give the text of the completion")
        if not isinstance(row.get("expected"), bool | None):
            raise ValueError(f"{path}:{number}: expected is {row['expected']!r}; give true or false, or leave it out")
        rows.append(row | {"line": number})
    if not rows:
        raise ValueError(f"{path} has no rows; give JSON lines with gold and response")
    return rows


def _verifier(name: str, workers: int, timeout: float) -> Verifier:
    cls = TASKS.get(name) or (_imported(name) if "." in name else REWARDS[name])
    if not (isinstance(cls, type) and issubclass(cls, Verifier)):
        raise ValueError(
            f"reward {name!r} checks no gold; choose one of {', '.join(verifiers())}, or a Verifier of yours"
        )
    return Math(workers=workers, timeout=timeout) if cls is Math else cls()


def _imported(path: str) -> Any:
    try:
        return import_path(path)
    except ImportPathError as error:
        raise ValueError(f"--reward {path} cannot be imported ({error})") from error


def score_rows(rows: Sequence[dict[str, Any]], reward: str | None, workers: int, timeout: float) -> list[Row]:
    """A verdict on each row, in order. Responses are read as ``answer_tag`` or wherever they state an answer."""
    found: dict[int, Row] = {}
    tasks = [str(row.get("task") or "math") for row in rows]
    for task in dict.fromkeys(tasks):
        if reward is None and task not in TASKS:
            raise ValueError(f"task {task!r} is not one of {', '.join(TASKS)}; rename it, or choose with --reward")
        verifier = _verifier(reward or task, workers, timeout)
        answer_format: AnswerFormat = ThinkAnswer() if (reward or task) == "answer_tag" else Stated()
        chosen = [i for i, name in enumerate(tasks) if name == task]
        golds = [rows[i]["gold"] for i in chosen]
        verdicts = verifier.check(golds, [answer_format.extract(rows[i]["response"]) for i in chosen])
        for i, verdict in zip(chosen, verdicts, strict=True):
            row = rows[i]
            found[i] = Row(
                row["line"], str(row.get("kind") or task), row.get("expected"), bool(row.get("debatable")),
                verdict.verdict, verdict.extracted, verdict.rule, str(row["gold"]),
            )  # fmt: skip
    return [found[i] for i in range(len(rows))]


def table(rows: Sequence[Row], wrong: bool = False) -> list[str]:
    """Verdicts by kind and, where ``expected`` is given, how many rows are as expected."""
    judged = [row for row in rows if row.expected is not None]
    width = max(4, *(len(row.kind) for row in rows))
    columns = [name for name in VERDICTS if any(row.verdict == name for row in rows)]
    head = f"{'kind':<{width}} {'rows':>6}" + ("  right" if judged else "") + "".join(f"  {name}" for name in columns)
    lines = [head]
    for kind in [*sorted({row.kind for row in rows}), "all"]:
        chosen = [row for row in rows if kind in ("all", row.kind)]
        counts = Counter(row.verdict for row in chosen)
        right = f"  {sum(row.right for row in chosen):>5}" if judged else ""
        cells = "".join(f"  {counts[name]:>{len(name)}}" for name in columns)
        lines.append(f"{kind:<{width}} {len(chosen):>6}{right}{cells}")
    missed = [row for row in judged if not row.right] if wrong else []
    lines += [
        f"line {row.line}: gold {row.gold[:80]!r}, read {(row.extracted or '')[:80]!r}: {row.verdict}, expected "
        f"{'correct' if row.expected else 'wrong'}{' (debatable)' if row.debatable else ''}"
        for row in missed
    ]
    bad = sorted({row.gold for row in rows if row.verdict == "unverifiable_gold"})
    lines += [f"{len(bad)} golds cannot be verified, such as {bad[0][:80]!r}"] if bad else []
    if judged:
        hung = sum(row.verdict == "timeout" and row.rule == "killed" for row in rows)
        crashed = sum(row.verdict == "crash" for row in rows)
        lines.append(
            f"verify: {sum(row.right for row in judged)} of {len(judged)} right, {hung} hung, {crashed} crashed"
        )
    return lines
