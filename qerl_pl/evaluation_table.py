"""Results of an evaluation as text."""

from collections.abc import Mapping, Sequence
from typing import Any


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table; the first line is its head, and columns that are empty below it are left out."""
    kept = [i for i in range(len(lines[0])) if any(line[i] for line in lines[1:])]
    widths = [max(len(line[i]) for line in lines) for i in kept]
    body = [[line[i] for i in kept] for line in lines]
    body.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        + " |"
        for line in body
    )  # fmt: skip


def percent(estimate: Mapping[str, float] | None, sign: str = "") -> str:
    """``32.0 % (29.5 to 34.6)``; with ``sign="+"`` in points, for differences."""
    if estimate is None:
        return ""
    value, low, high = (f"{100 * estimate[key]:{sign}.1f}" for key in ("value", "low", "high"))
    return f"{value}{'' if sign else ' %'} ({low} to {high})"


def table(result: Mapping[str, Any]) -> str:
    """Settings, sets, levels and subjects of ``results/*.json``."""
    settings, sets = result["settings"], result["sets"]
    counts = {summary["samples"] for summary in sets.values()}
    n = str(counts.pop()) if len(counts) == 1 else "1"
    head = ["set", "problems", "pass@1 (95 %)", "base", "difference"]
    head += [f"pass@{n}", f"majority@{n}"] if n != "1" else []
    lines = [head]
    for name, summary in sets.items():
        line = [name, str(summary["problems"]), percent(summary["pass@1"])]
        line += [
            percent(summary["base"]["pass@1"]) if "base" in summary else "",
            percent(summary.get("difference"), "+"),
        ]
        line += [percent(summary[f"{kind}@k"][n]) for kind in ("pass", "majority") if n != "1"]
        lines.append(line)
    if len(sets) > 1:
        base = result["base"]["pass@1"] if "base" in result else None
        mean = ["mean", "", percent(result["pass@1"]), percent(base), percent(result.get("difference"), "+")]
        lines.append(mean + [""] * (len(head) - len(mean)))
    parts = [["set", "part", "problems", "pass@1 (95 %)", "base"]]
    for name, summary in sets.items():
        for group in ("level", "subject"):
            for value, part in summary.get(group, {}).items():
                base = summary["base"][group][value]["pass@1"] if "base" in summary else None
                label = value if value.lower().startswith(group) else f"{group} {value}"
                parts.append([name, label, str(part["problems"]), percent(part["pass@1"]), percent(base)])
    said = f"{result['split']}: {settings['policy']}, noise off, T {settings['temperature']:g}, "
    said += f"top-p {settings['top_p']:g}, at most {settings['max_tokens']} tokens, samples a problem: {n}"
    for name, summary in sets.items():
        if summary["ungraded"]:
            said += f"\n{name}: {summary['ungraded']} problems cannot be checked by {settings['correctness']}: wrong"
    return "\n\n".join([said, markdown(lines), *([markdown(parts)] if len(parts) > 1 else [])])
