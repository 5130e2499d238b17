"""How often the 95 % interval of pass@1 holds the truth: ``python benchmarks/coverage.py --output FILE.json``.

Simulated evaluations: the chances of m problems are drawn from a population of known mean, then n answers to each.
"""

import argparse
import json
import math
import random
from pathlib import Path
from statistics import fmean, variance

from qerl_pl.bench.machine import describe
from qerl_pl.statistics import mean_of_rates

POPULATIONS = {"competition": (0.15, 0.85), "almost never solved": (0.05, 0.95)}  # of chances: a, b of a beta law


def normal(rates: list[float]) -> tuple[float, float]:
    """The textbook interval, p ± 1.96 s/√m."""
    half = 1.96 * math.sqrt(variance(rates) / len(rates))
    return fmean(rates) - half, fmean(rates) + half


def coverage(population: str, problems: int, answers: int, evaluations: int) -> dict[str, object]:
    a, b = POPULATIONS[population]
    mean, rng = a / (a + b), random.Random(f"{population} {problems} {answers}")
    ours = textbook = 0
    for _ in range(evaluations):
        chances = [rng.betavariate(a, b) for _ in range(problems)]
        rates = [sum(rng.random() < p for _ in range(answers)) / answers for p in chances]
        estimate = mean_of_rates(rates, problems * answers)
        low, high = normal(rates)
        ours += estimate.low <= mean <= estimate.high
        textbook += low <= mean <= high
    return {
        "population": population, "problems": problems, "answers": answers,
        "wilson_effective": round(ours / evaluations, 4), "normal": round(textbook / evaluations, 4),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--evaluations", type=int, default=3_000)
    parser.add_argument("--commit", help="if this is no git checkout")
    given = parser.parse_args()
    rows = [coverage(name, m, 16, given.evaluations) for name in POPULATIONS for m in (15, 30, 60)]
    result = {**describe(given.commit), "evaluations": given.evaluations, "rows": rows}
    given.output.write_text(json.dumps(result, indent=2) + "\n")
    print(*rows, sep="\n")


if __name__ == "__main__":
    main()
