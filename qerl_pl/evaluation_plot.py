"""A picture of an evaluation: pass@1 by set and by level or subject, and pass@k."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

POLICY, BASE, GREY = "#1d4ed8", "#9ca3af", "#6b7280"


def draw(result: Mapping[str, Any], target: Path) -> None:
    """Bars with 95 % intervals, the base beside them if it was evaluated. ImportError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("matplotlib is not installed; pip install 'qerl-pl[plot]'") from error
    panels = bars(result)
    curves = {name: s["pass@k"] for name, s in result["sets"].items() if len(s["pass@k"]) > 1}
    count = len(panels) + bool(curves)
    figure = Figure(figsize=(7.5, 3.2 * count), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(count, 1, squeeze=False)[:, 0]
    for axis, (title, groups) in zip(axes, panels.items(), strict=False):
        _grouped(axis, groups)
        axis.set_title(title, loc="left", fontweight="bold")
    if curves:
        for name, curve in curves.items():
            values = [100 * e["value"] for e in curve.values()]
            axes[-1].plot([int(k) for k in curve], values, marker="o", markersize=4, label=name)
        axes[-1].set_xscale("log", base=2)
        axes[-1].set_xticks([int(k) for k in next(iter(curves.values()))], list(next(iter(curves.values()))))
        axes[-1].set_title("pass@k, %", loc="left", fontweight="bold")
        axes[-1].set_xlabel("k")
        axes[-1].legend(frameon=False, fontsize=8)
    for axis in axes:
        axis.set_ylim(0, 108)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", linewidth=0.4, alpha=0.6)
        axis.set_axisbelow(True)
    settings = result["settings"]
    figure.supxlabel(
        f"{settings['policy']} · {settings['model']} · {settings['quantization']} · T {settings['temperature']:g}, "
        f"top-p {settings['top_p']:g}, {settings['max_tokens']} tokens, n = {settings['samples']}",
        fontsize=7, color=GREY,
    )  # fmt: skip
    figure.savefig(target, dpi=120)


Bars = dict[str, dict[str, Mapping[str, float]]]
"""Label below a group of bars -> policy or base -> estimate."""


def bars(result: Mapping[str, Any]) -> dict[str, Bars]:
    """What is drawn, by title: the sets (and their mean), then what has levels or subjects."""
    based = "base" in result
    sets: Bars = {name: _pair(summary, summary["base"] if based else None) for name, summary in result["sets"].items()}
    if len(sets) > 1:
        sets["mean"] = _pair(result, result["base"] if based else None)
    panels = {"pass@1, %": sets}
    for name, summary in result["sets"].items():
        for group in ("level", "subject"):
            parts = summary.get(group, {})
            if len(parts) > 1:
                title = f"{name} by {group}: pass@1, %"
                panels[title] = {v: _pair(p, summary["base"][group][v] if based else None) for v, p in parts.items()}
    return panels


def _pair(policy: Mapping[str, Any], base: Mapping[str, Any] | None) -> dict[str, Mapping[str, float]]:
    return ({} if base is None else {"base": base["pass@1"]}) | {"policy": policy["pass@1"]}


def _grouped(axis: Any, groups: Bars) -> None:
    series = list(next(iter(groups.values())))
    width = 0.8 / len(series)
    for number, name in enumerate(series):
        for x, group in enumerate(groups.values()):
            value, low, high = (100 * group[name][key] for key in ("value", "low", "high"))
            at = x + (number - (len(series) - 1) / 2) * width
            label = name if x == 0 and len(series) > 1 else None
            axis.bar(at, value, width * 0.92, color=POLICY if name == "policy" else BASE, label=label)
            axis.errorbar(at, value, [[value - low], [high - value]], color="#111827", linewidth=0.9, capsize=2)
            axis.annotate(f"{value:.1f}", (at, high), (0, 3), textcoords="offset points", ha="center", fontsize=7)
    axis.set_xticks(range(len(groups)), list(groups), rotation=20 if len(groups) > 6 else 0)
    axis.set_xlim(-0.6, max(len(groups), 3) - 0.4)
    if len(series) > 1:
        axis.legend(frameon=False, fontsize=8, loc="upper right")
