"""Pictures of results: one PNG beside each JSON file."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from qerl_pl.bench.results import IDENTITY

COLORS = ("#1d4ed8", "#60a5fa", "#b45309", "#fbbf24", "#15803d", "#86efac", "#7e22ce", "#d8b4fe", "#475569", "#cbd5e1")
GREY = "#6b7280"
Labelled = tuple[str, dict[str, Any]]
"""The name of a series of bars, and a row of it."""


@dataclass(frozen=True)
class Panel:
    """Bars of ``value``: groups by ``group``, one bar for each combination of what else differs; of the rows with a
    memory ``budget``, or of the others.
    """

    value: str
    title: str
    group: str = "model"
    log: bool = False
    better: str = "lower is better"
    budget: bool = False


PANELS = {
    "rollout": [
        Panel("tokens_per_s", "sampled tokens per second", "batch", log=True, better="higher is better"),
        Panel("tokens_per_s", "tokens per second, as many as fit", better="higher is better", budget=True),
    ],
    "train": [
        Panel("milliseconds", "forward + backward of a micro-batch, ms"),
        Panel("share", "share of the measured BF16 matmul rate", better="higher is better"),
        Panel("peak_gb", "peak memory, GB"),
    ],
    "sync": [Panel("milliseconds", "into the running engine, ms")],
    "decode": [Panel("step_us", "decoding step, µs", "batch")],
    "linear": [Panel("microseconds", "layer of a decoding step, µs", "tokens", log=True)],
    "step": [Panel("milliseconds", "phase of a step, ms", "phase")],
    "memory": [Panel("peak_gb", "peak memory of a whole step, GB")],
}


def plot(folder: Path) -> None:
    """Pictures of rollout.json, train.json and the other results in a folder.

    Args:
        folder: with the JSON files; the PNGs are written beside them.
    """
    found = [name for name in PANELS if (folder / f"{name}.json").is_file()]
    if not found:
        raise ValueError(f"{folder}: none of {', '.join(f'{name}.json' for name in PANELS)}; measure with --output")
    for name in found:
        result = json.loads((folder / f"{name}.json").read_text())
        target = folder / f"{name}.png"
        draw(result, PANELS[name], target)
        print(target)


def draw(result: dict[str, Any], panels: Sequence[Panel], target: Path) -> None:
    """One row of axes for each panel; with groups other than models, one for each model and panel."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("bench plot needs matplotlib: pip install 'qerl-pl[plot]'") from error
    rows = result["rows"]
    shown: list[tuple[Panel, str, list[Labelled], dict[str, str]]] = []
    for panel in panels:
        own = [row for row in rows if ("budget_gb" in row) == panel.budget]
        drawn = [row for row in own if panel.value in row or ("error" in row and panel.group in row)]
        if not any(panel.value in row for row in drawn):
            continue
        labelled = [(_label(row, panel.group, drawn), row) for row in drawn]
        series = dict.fromkeys(label for label, _ in labelled)
        colors = dict(zip(series, itertools.cycle(COLORS), strict=False))  # the same on the axes of all models
        models = list(dict.fromkeys(row["model"] for row in drawn)) if panel.group != "model" else [""]
        shown += [(panel, m, [(s, r) for s, r in labelled if not m or r["model"] == m], colors) for m in models]
    if not shown:
        raise ValueError(f"{target.name}: no row has {' or '.join(panel.value for panel in panels)}")
    bars = max(len({s for s, _ in part}) * len(_groups([r for _, r in part], p.group)) for p, _, part, _ in shown)
    figure, axes = plt.subplots(
        len(shown), 1, figsize=(min(20.0, max(7.5, 0.42 * bars + 2.5)), 3.6 * len(shown)), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, (panel, model, part, colors) in zip(axes[:, 0], shown, strict=True):
        _grouped(axis, panel, part, colors)
        axis.set_title(f"{model}: {panel.title}" if model else panel.title, loc="left", fontweight="bold")
        axis.set_title(panel.better, loc="right", fontsize=8, color=GREY)
    versions = ", ".join(f"{name} {v}" for name, v in result["versions"].items() if name in ("torch", "vllm", "peft"))
    figure.supxlabel(
        f"{result.get('card') or result['machine']} · {_from(result)} · {versions}\n"
        f"{fill(', '.join(_same(rows)), 110)}",
        fontsize=7, color=GREY,
    )  # fmt: skip
    figure.savefig(target, dpi=120)
    plt.close(figure)


def _from(result: dict[str, Any]) -> str:
    """Commits and dates of the runs that the rows are from."""
    used = [result["runs"][i] for i in sorted({row["run"] for row in result["rows"]})]
    dates, commits = (list(dict.fromkeys(run[key] for run in used)) for key in ("date", "commit"))
    return f"{', '.join(dates)} · {', '.join(commits)}"


def _grouped(axis: Any, panel: Panel, labelled: list[Labelled], colors: dict[str, str]) -> None:
    rows = [row for _, row in labelled]
    groups = _groups(rows, panel.group)
    series = [label for label in colors if any(label == other for other, _ in labelled)]
    width = 0.84 / len(series)
    values = [row[panel.value] for row in rows if panel.value in row]
    low, high = min(values), max(values)
    for number, label in enumerate(series):
        color = colors[label]
        first = True
        for row in (row for other, row in labelled if other == label):
            x = groups.index(row.get(panel.group)) + (number - (len(series) - 1) / 2) * width
            if panel.value not in row:
                text = "out of memory" if row.get("error") == "out of memory" else "failed"
                height = low if panel.log else 0.0
                axis.text(x, height, f" {text}", rotation=90, ha="center", va="bottom", fontsize=7, color=color)
                continue
            value = row[panel.value]
            extremes = [[value - row.get(f"{panel.value}_min", value)], [row.get(f"{panel.value}_max", value) - value]]
            axis.bar(x, value, width * 0.94, color=color, label=label if first else None)
            axis.errorbar(x, value, extremes, color="#111827", linewidth=0.8)
            top = row.get(f"{panel.value}_max", value)
            axis.annotate(
                _number(value), (x, top), (0, 3), textcoords="offset points", rotation=90, ha="center", va="bottom",
                fontsize=7,
            )  # fmt: skip
            first = False
    if panel.log:
        axis.set_yscale("log")
        axis.set_ylim(low / 2, high * max(3.0, (high / low) ** 0.25))  # room for the numbers
    else:
        axis.set_ylim(0, 1.3 * high)
    axis.set_xlim(-0.55, len(groups) - 0.45)
    axis.set_xticks(range(len(groups)), [str(group) for group in groups])
    axis.set_xlabel(panel.group)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", linewidth=0.4, alpha=0.6)
    axis.set_axisbelow(True)
    if len(series) > 1:
        axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _groups(rows: list[dict[str, Any]], key: str) -> list[Any]:
    found = list(dict.fromkeys(row[key] for row in rows if key in row))
    return sorted(found) if all(isinstance(group, int) for group in found) else found


def _label(row: dict[str, Any], group: str, rows: list[dict[str, Any]]) -> str:
    """What tells the bars of a group apart; within a memory budget the batch is what fits."""
    left_out = ("bench", "model", group, "batch" if "budget_gb" in row else "")
    keys = [key for key in IDENTITY if key not in left_out and len({other.get(key) for other in rows}) > 1]
    parts = [(key, row[key]) for key in keys if key in row]
    return ", ".join(value if isinstance(value, str) else f"{key} {value}" for key, value in parts)


def _same(rows: list[dict[str, Any]]) -> list[str]:
    """What all rows have in common."""
    keys = [key for key in IDENTITY[1:] if len({row.get(key) for row in rows}) == 1 and key in rows[0]]
    return [f"{key.replace('_', ' ')} {rows[0][key]}" for key in keys]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
