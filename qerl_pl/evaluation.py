"""Graded answers, set by set, and what they say of the policy."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import zip_longest
from statistics import fmean
from typing import Any

from qerl_pl.distributed import gather
from qerl_pl.statistics import (
    Estimate,
    majority_at_k,
    mean_difference,
    mean_of_rates,
    mean_over_sets,
    pass_at_k,
)
from qerl_pl.types import RolloutBatch
from registry.prompts import PromptSource
from registry.rewards import AnswerFormat
from registry.rewards.numbers import parse_number

PROBLEM_ID = "problem_id"
GROUPS = {"level": ("level",), "subject": ("subject", "type")}
"""What results are broken down by -> the columns that may hold it."""


class Identified(PromptSource):
    """A source whose rows also have ``problem_id``: a hash of prompt and answer, so that evaluations with other prompt
    formats, other orders or a changed data set are paired by what the problem is. A row that recurs is numbered.
    """

    def __init__(self, source: PromptSource) -> None:
        self.source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["source"], name)

    def __len__(self) -> int:
        return len(self.source)

    def notes(self) -> list[str]:
        return self.source.notes()

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        seen: Counter[str] = Counter()
        rows = []
        for row in self.source:
            prompt = row["prompt"]
            if not isinstance(prompt, str) and [message["role"] for message in prompt] == ["user"]:
                prompt = prompt[0]["content"]  # the same problem, written as a chat
            text = json.dumps([prompt, row.get("answer")], ensure_ascii=False, default=str)
            name = hashlib.sha256(text.encode()).hexdigest()[:16]
            seen[name] += 1
            rows.append(row | {PROBLEM_ID: name if seen[name] == 1 else f"{name}#{seen[name]}"})
        return rows


@dataclass
class Problem:
    """One problem with its n graded answers."""

    id: str
    right: list[bool]
    votes: list[str | None]  # what majority@k compares; None: no answer
    lengths: list[int]  # tokens
    finished: list[bool]
    graded: bool  # False: the verifier abstained, and the answers count as wrong
    groups: dict[str, str]  # level, subject

    @property
    def rate(self) -> float:
        return fmean(self.right)


_BEGINS_WITH_A_NUMBER = re.compile(r"[^\w\\]*(?:\\[dt]?frac)?[^\w\\]*\d")


def vote(answer: str | None) -> str | None:
    """What two answers must share to be the same: their number if they begin with one and state no other (1/2 and 0.5,
    8 and 8 dollars), else their text without spaces.
    """
    if answer is None:
        return None
    number = parse_number(answer) if _BEGINS_WITH_A_NUMBER.match(answer) else None
    return "".join(answer.split()) if number is None else str(number)


@dataclass
class Grades:
    """The problems of each set, in order. A single set that has no name is called ''."""

    sets: dict[str, list[Problem]] = field(default_factory=dict)

    def add(self, batch: RolloutBatch, correctness: str, answer_format: AnswerFormat) -> None:
        """All problems of ``batch``, whose rows of one problem are adjacent; a score of 1 is a right answer."""
        scores = batch.reward_parts[correctness].tolist()
        groups = batch.groups.tolist()
        starts = [i for i, group in enumerate(groups) if not i or groups[i - 1] != group]
        for start, end in zip(starts, [*starts[1:], len(groups)], strict=True):
            columns, completions = batch.prompts[start].columns, batch.completions[start:end]
            names = {g: next((c for c in known if columns.get(c) is not None), None) for g, known in GROUPS.items()}
            problem = Problem(
                id=str(columns.get(PROBLEM_ID, start)),
                right=[score >= 1 for score in scores[start:end]],  # NaN is not
                votes=[vote(answer_format.extract(c.text)) for c in completions],
                lengths=[len(c.token_ids) for c in completions],
                finished=[c.finished for c in completions],
                graded=any(score == score for score in scores[start:end]),
                groups={group: str(columns[column]) for group, column in names.items() if column},
            )
            self.sets.setdefault(batch.source, []).append(problem)

    def gathered(self) -> "Grades":
        """Those of all processes, which take the problems in turn."""
        parts = gather(self.sets)
        names = list(dict.fromkeys(name for part in parts for name in part))
        rows = {name: zip_longest(*(part.get(name, []) for part in parts)) for name in names}
        return Grades({name: [p for row in rows[name] for p in row if p is not None] for name in names})

    def metrics(self, split: str) -> dict[str, float]:
        """For the log: ``split/pass@1`` (over several sets, their mean) and ``split/SET/pass@1``, each with ``_low``
        and ``_high``; with several samples also ``pass@n`` and ``majority@n``.
        """
        found: dict[str, float] = {}
        for name, problems in self.sets.items():
            prefix, n = f"{split}/{name}" if name else split, len(problems[0].right)
            found |= _ends(f"{prefix}/pass@1", pass_rate(problems))
            if n > 1:
                found[f"{prefix}/pass@{n}"] = pass_rate(problems, n).value
                found[f"{prefix}/majority@{n}"] = majority_rate(problems, n).value
        if self.sets and "" not in self.sets:
            found |= _ends(f"{split}/pass@1", mean_over_sets([pass_rate(p) for p in self.sets.values()]))
        return found


def metric_names(split: str, sets: Iterable[str], samples: int) -> set[str]:
    """All that is logged of an evaluation of sets with these names."""
    n = samples
    graded = Grades({name: [Problem("", [False] * n, [None] * n, [0] * n, [True] * n, True, {})] for name in sets})
    prefixes = [f"{split}/{name}" if name else split for name in graded.sets]
    others = {f"{prefix}/{k}" for prefix in prefixes for k in ("reward", "mean_length", "clipped_ratio")}
    return others | graded.metrics(split).keys()


def _ends(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def pass_rate(problems: Sequence[Problem], k: int = 1) -> Estimate:
    """pass@k: the chance that k answers to a problem hold a right one."""
    rates = [pass_at_k(len(p.right), sum(p.right), k) for p in problems]
    return mean_of_rates(rates, sum(len(p.right) for p in problems) / k)


def majority_rate(problems: Sequence[Problem], k: int) -> Estimate:
    """majority@k: the chance that the most frequent of k answers to a problem is right."""
    rates = [majority_at_k(p.votes, p.right, k) for p in problems]
    return mean_of_rates(rates, sum(len(p.right) for p in problems) / k)


def ks(samples: int) -> list[int]:
    """1, 2, 4, ... and the number of samples itself."""
    return sorted({*(2**i for i in range(samples.bit_length())), samples})


def summarize(problems: Sequence[Problem]) -> dict[str, Any]:
    """All that is reported of one set, ready for JSON."""
    n = len(problems[0].right)
    lengths = [length for p in problems for length in p.lengths]
    groups = {g: list(dict.fromkeys(p.groups[g] for p in problems if g in p.groups)) for g in GROUPS}
    return {
        "problems": len(problems),
        "samples": n,
        "ungraded": sum(not p.graded for p in problems),
        "mean_length": fmean(lengths),
        "clipped_ratio": 1 - fmean(f for p in problems for f in p.finished),
        "pass@1": asdict(pass_rate(problems)),
        "pass@k": {str(k): asdict(pass_rate(problems, k)) for k in ks(n)},
        "majority@k": {str(k): asdict(majority_rate(problems, k)) for k in ks(n)},
        **{
            group: {value: _part([p for p in problems if p.groups.get(group) == value]) for value in _ordered(values)}
            for group, values in groups.items()
            if values
        },
        "rows": [{"id": p.id, "right": sum(p.right), **p.groups} for p in problems],
    }


def _ordered(values: Sequence[str]) -> list[str]:
    """Numbers by size (Level 9 before Level 10), before words."""
    return sorted(values, key=lambda text: [(not t.isdigit(), int(t) if t.isdigit() else 0, t) for t in text.split()])


def _part(problems: Sequence[Problem]) -> dict[str, Any]:
    return {"problems": len(problems), "pass@1": asdict(pass_rate(problems))}


def report(split: str, settings: Mapping[str, Any], policy: Grades, base: Grades | None) -> dict[str, Any]:
    """The whole result of an evaluation, ready for JSON; with ``base`` also its numbers, and the paired difference."""
    sets: dict[str, Any] = {}
    differences: list[Estimate] = []
    for name, problems in policy.sets.items():
        summary = summarize(problems)
        if base is not None:
            other = base.sets[name]
            assert [p.id for p in problems] == [p.id for p in other]
            changes = [p.rate - q.rate for p, q in zip(problems, other, strict=True)]
            differences.append(mean_difference(changes, len(problems[0].right)))
            summary |= {"base": summarize(other), "difference": asdict(differences[-1])}
        sets[name or split] = summary
    result = {"split": split, "settings": dict(settings), "pass@1": asdict(_mean(policy)), "sets": sets}
    if base is not None:
        result["base"] = {"pass@1": asdict(_mean(base))}
        result["difference"] = asdict(differences[0] if len(sets) == 1 else mean_over_sets(differences, lowest=-1))
    return result


def _mean(grades: Grades) -> Estimate:
    rates = [pass_rate(problems) for problems in grades.sets.values()]
    return rates[0] if len(rates) == 1 else mean_over_sets(rates)
