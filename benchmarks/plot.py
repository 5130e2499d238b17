"""Draw the curves of ``learning.json``: python benchmarks/plot.py RESULT.json OUT.png"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BLUE, ORANGE, GREY = "#2563eb", "#ea580c", "#6b7280"


def main(source: Path, target: Path) -> None:
    result = json.loads(source.read_text())
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    learning, exploring, agreement = axes
    for row in result["rows"]:
        curves = row["curves"]
        one = len(result["rows"]) == 1
        line(learning, smooth(curves["reward"]), BLUE, "training reward (mean of 8 steps)")
        last = curves["reward"][-1][0]
        points = [[0, *row["before"]], [last, *row["after"]]]
        learning.errorbar(
            *zip(*points, strict=True), color=ORANGE, marker="o", capsize=4, linestyle="", label="test pass@1, 95 %"
        )
        line(learning, curves.get("validation/pass@1", []), ORANGE, "validation pass@1", marker=".", linestyle=":")
        line(exploring, curves["entropy"], BLUE, "entropy, nats per token")
        line(agreement, curves["sampling/logp_difference/mean"], BLUE, "|log p: engine − trainer|")
        line(agreement, [p for p in curves["noise/kl"] if p[1] > 0], ORANGE, "KL per token of the noise")
        line(
            agreement,
            [p for p in curves["noise/sigma"] if p[1] > 0],
            GREY,
            "noise σ",
            drawstyle="steps-post",
            alpha=1 if one else 0.4,
        )
    learning.set_ylim(0, None)
    exploring.set_ylim(0, None)
    agreement.set_yscale("log")
    for axis, title in zip(axes, ("Is it learning?", "Is it exploring?", "Is the sampler in step?"), strict=True):
        axis.set_title(title, loc="left", fontweight="bold")
        axis.set_xlabel("rollout batch")
        axis.spines[["top", "right"]].set_visible(False)
        handles, labels = axis.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        axis.legend(unique.values(), unique.keys(), frameon=False, fontsize=8)
    figure.suptitle(
        f"{result['machine']} · {result['date']} · {result['commit']}", fontsize=8, color=GREY, x=0.995, ha="right"
    )
    figure.savefig(target, dpi=110)


def line(axis: Any, points: list[list[float]], color: str, label: str, **style: Any) -> None:
    if points:
        axis.plot(*zip(*points, strict=True), color=color, label=label, linewidth=1.4, **style)


def smooth(points: list[list[float]], width: int = 8) -> list[list[float]]:
    """Mean over the last ``width`` values."""
    values = [v for _, v in points]
    return [
        [step, sum(values[max(0, i - width + 1) : i + 1]) / min(width, i + 1)] for i, (step, _) in enumerate(points)
    ]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
