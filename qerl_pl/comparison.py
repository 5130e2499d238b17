"""``qerl-pl compare``: two evaluations, paired by problem."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from qerl_pl.evaluation_table import markdown, percent
from qerl_pl.run_settings import changes, run_settings
from qerl_pl.statistics import Estimate, mean_difference, mean_over_sets, sign_test
from registry.prompts.files import read_text

HELP = """\
usage: qerl-pl compare A.json B.json

Compare two results of qerl-pl test or validate, problem by problem: how much better B is than A, with a 95 % interval.
Both must have the same sets with the same problems; prompts, samples, models may differ."""


@dataclass(frozen=True)
class Difference:
    """B − A on one set."""

    problems: int
    samples: tuple[int, int]
    a: Mapping[str, float]  # pass@1: value, low, high
    b: Mapping[str, float]
    difference: Estimate
    better: int  # problems with a higher share of right answers in B
    worse: int

    @property
    def equal(self) -> int:
        return self.problems - self.better - self.worse

    @property
    def p_value(self) -> float | None:
        """McNemar's exact test; None with several samples, where problems are no mere yes or no."""
        return sign_test(self.better, self.worse) if self.samples == (1, 1) else None


def command(args: Sequence[str]) -> None:
    """The command line: two files, and nothing else."""
    if args and args[0] in ("-h", "--help"):
        print(HELP)
        return
    if len(args) != 2:
        raise ValueError(f"compare: {len(args)} arguments; give two files, as in qerl-pl compare A.json B.json")
    first, second = (read(Path(arg)) for arg in args)
    differences = compare(first, second)
    print(f"A: {args[0]}\nB: {args[1]}\n")
    changed = differing(first["settings"], second["settings"])
    a, b = (
        trained_with(Path(arg), result["settings"]["policy"]) for arg, result in zip(args, (first, second), strict=True)
    )
    if a and b:
        changed += [[f"fit: {name}", *map(_cell, values)] for name, *values in changes(a, b)]
    print(markdown([["setting", "A", "B"], *changed]) + "\n" if changed else "all settings are the same\n")
    print(table(differences))


def read(path: Path) -> dict[str, Any]:
    """A result of ``qerl-pl test``. ValueError if the file is none, or contradicts itself."""
    if not path.is_file():
        raise ValueError(f"compare: there is no file {path}; qerl-pl test writes results/test.json in its run's folder")
    text = read_text(str(path))
    try:
        result = json.loads(text)
        complete = result["sets"] and all(isinstance(summary["rows"], list) for summary in result["sets"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        complete = False
    if not complete:
        raise ValueError(f"compare: {path} is no result of qerl-pl test or validate; give its results/*.json")
    if fault := next(faults(result), None):
        raise ValueError(f"compare: {path}: {fault}; give it as qerl-pl test or validate wrote it, or evaluate again")
    return result  # type: ignore[no-any-return]


def faults(result: Mapping[str, Any]) -> Iterator[str]:
    """What a result lacks, and where it contradicts itself: a file that was edited or cut would be believed."""
    settings = result.get("settings")
    if not isinstance(settings, Mapping) or not isinstance(settings.get("policy"), str):
        yield "settings.policy is missing"
    for name, summary in result["sets"].items():
        samples, rates = summary.get("samples"), dict[str, float]()
        if type(samples) is not int or samples < 1:
            yield f"{name}: samples is {samples!r}, not a whole number from 1"
            continue
        for number, row in enumerate(summary["rows"], start=1):
            problem, right = (row.get("id"), row.get("right")) if isinstance(row, Mapping) else (None, None)
            if not isinstance(problem, str):
                yield f"{name}: row {number} has no id"
            elif problem in rates:
                yield f"{name}: the id {problem!r} is given twice"
            elif type(right) is not int or not 0 <= right <= samples:
                yield f"{name}: right of {problem!r} is {right!r}, not a whole number in 0..{samples}"
            else:
                rates[problem] = right / samples
        given = summary.get("pass@1")
        ends: list[Any] = [given.get(end) for end in ("value", "low", "high")] if isinstance(given, Mapping) else []
        if not ends or not all(isinstance(end, int | float) for end in ends):
            yield f"{name}: pass@1 is {given!r}, not value, low and high"
        elif not rates or not abs(ends[0] - fmean(rates.values())) <= 1e-6:  # NaN is not; a report rounds nothing
            yield f"{name}: pass@1 is {ends[0]}, but {sum(rates.values()):g} of {len(rates)} rows are right"


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Difference]:
    """By set. ValueError unless both have the same sets, and in each of them the same problems."""
    if a["sets"].keys() != b["sets"].keys():
        raise ValueError(
            f"compare: A has the sets {', '.join(a['sets'])}, B has {', '.join(b['sets'])}; evaluate both on the same, "
            "under the same names"
        )
    return {name: _compare(name, a["sets"][name], b["sets"][name]) for name in a["sets"]}


def _compare(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Difference:
    first, second = ({row["id"]: row["right"] / summary["samples"] for row in summary["rows"]} for summary in (a, b))
    if first.keys() != second.keys():
        raise ValueError(
            f"compare: of the problems of {name} {len(first.keys() - second.keys())} are only in A and "
            f"{len(second.keys() - first.keys())} only in B; evaluate both on the same problems (data set, limit, and "
            "data.max_prompt_length, which drops long ones)"
        )
    changes = [second[problem] - first[problem] for problem in first]
    return Difference(
        problems=len(changes),
        samples=(a["samples"], b["samples"]),
        a=a["pass@1"],
        b=b["pass@1"],
        difference=mean_difference(changes, min(a["samples"], b["samples"])),
        better=sum(change > 0 for change in changes),
        worse=sum(change < 0 for change in changes),
    )


def table(differences: Mapping[str, Difference]) -> str:
    """A row a set, and their mean."""
    lines = [["set", "problems", "A, pass@1 (95 %)", "B", "B − A", "better", "worse", "equal", "exact p"]]
    for name, d in differences.items():
        p = "" if d.p_value is None else f"{d.p_value:.2g}"
        counts = [str(d.better), str(d.worse), str(d.equal)]
        lines.append(
            [name, str(d.problems), percent(d.a), percent(d.b), percent(asdict(d.difference), "+"), *counts, p]
        )
    if len(differences) > 1:
        means = [mean_over_sets([Estimate(**getattr(d, side)) for d in differences.values()]) for side in ("a", "b")]
        change = mean_over_sets([d.difference for d in differences.values()], lowest=-1)
        cells = [percent(asdict(means[0])), percent(asdict(means[1])), percent(asdict(change), "+")]
        lines.append(["mean", "", *cells, "", "", "", ""])
    return markdown(lines)


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[list[str]]:
    """Settings that are not the same, with both values; not the sources, whose problems are compared themselves."""
    return [[n, str(a.get(n, "")), str(b.get(n, ""))] for n, _, _ in changes(a, b) if n != "sources"]


def trained_with(result: Path, policy: str) -> dict[str, Any]:
    """Settings of the ``fit`` that made the policy of a result; empty for the base, and where they are not known: of
    a path that is not absolute nobody knows where it began.
    """
    kind, _, name = policy.partition(" ")
    path = result.resolve() if kind == "after" else Path(name)
    if kind not in ("after", "checkpoint", "adapter") or not path.is_absolute():
        return {}
    folder = path.resolve().parent
    return run_settings(folder if kind == "adapter" else folder.parent)


def _cell(value: Any) -> str:
    text = "" if value is None else str(value).replace("|", "/")
    return text if len(text) <= 60 else f"{text[:57]}..."
