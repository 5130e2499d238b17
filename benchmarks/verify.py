"""Verdicts a second, and what a poisoned batch costs: ``python benchmarks/verify.py --out FILE.json``."""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from qerl_pl.bench.machine import describe
from registry.rewards import GSM8K, Math, Stated
from registry.rewards.workers import Pool

MATH = [
    (r"\frac{1}{2}", r"0.5"), (r"\frac{{n}}{{7}}", r"{n}/7"), (r"{n}\sqrt{{2}}", r"\sqrt{{2}}\cdot {n}"),
    (r"x^2+{n}x", r"x(x+{n})"), (r"\frac{{\sqrt{{{n}}}}}{{2}}", r"\sqrt{{{n}}}/2"), (r"({n}, 3)", r"({n}, 4)"),
    (r"\{{1, {n}\}}", r"\{{{n}, 1\}}"), (r"[{n}, \infty)", r"x \ge {n}"), (r"y={n}x+1", r"{n}x-y+1=0"),
    (r"\pi {n}", r"{n}\pi+1"), (r"e^{{{n}x}}", r"(e^x)^{{{n}}}"), (r"{n}", r"{n}"),
    (r"\frac{{x+{n}}}{{x-1}}", r"1+\frac{{{n}+1}}{{x-1}}"), (r"1 \pm \sqrt{{{n}}}", r"1-\sqrt{{{n}}}, 1+\sqrt{{{n}}}"),
]  # fmt: skip
TEXT = "We add and subtract, and then we compare both sides of what we have. " * 20


def gsm8k(count: int) -> tuple[list[str], list[str]]:
    chance = random.Random(0)
    numbers = [chance.randint(1, 10_000) for _ in range(count)]
    golds = [f"A solution with {n} steps.\n#### {n:,}" for n in numbers]
    return golds, [f"{TEXT}\n#### {n + chance.randint(0, 1)}" for n in numbers]


def math(count: int, group: int) -> tuple[list[str], list[str]]:
    """Every problem another one, ``group`` completions each with at most two different answers."""
    golds, texts = [], []
    for i in range(count // group):
        gold, answer = MATH[i % len(MATH)]
        n = 2 + i
        for j in range(group):
            golds.append(gold.replace("{n}", str(n)).replace("{{", "{").replace("}}", "}"))
            right = answer.replace("{n}", str(n)).replace("{{", "{").replace("}}", "}")
            texts.append(f"{TEXT} \\boxed{{{right if (i + j) % 2 else right + ' + 1'}}}")
    return golds, texts


def rate(verifier: Any, golds: list[str], texts: list[str]) -> dict[str, float]:
    verifier.check([golds[0], r"\frac{x}{3}"], [Stated().extract(texts[0]), r"\frac{1}{3}x"])  # starts the workers
    start = time.perf_counter()
    verdicts = verifier.check(golds, [Stated().extract(text) for text in texts])
    seconds = time.perf_counter() - start
    right = sum(verdict.verdict == "correct" for verdict in verdicts)
    in_workers = sum(verdict.ms > 0 for verdict in verdicts)
    return {"verdicts": len(verdicts), "correct": right, "in_workers": in_workers, "seconds": round(seconds, 3),
            "per_second": round(len(verdicts) / seconds, 1)}  # fmt: skip


def poisoned(count: int, workers: int, timeout: float) -> dict[str, float]:
    """One case in ten never ends: the regular expression of this module's pattern against a text of only ``a``."""
    pool = Pool("registry.rewards.regex:case", workers, timeout)
    pool.run([["a", "a"]])
    cases = [["(a+)+b", "a" * 60 if i % 10 == 0 else "aab"] for i in range(count)]
    start = time.perf_counter()
    done = pool.run(cases)
    seconds = time.perf_counter() - start
    pool.close()
    hung = sum(result.status == "timeout" for result in done)
    return {"cases": count, "hung": hung, "workers": workers, "timeout_s": timeout, "seconds": round(seconds, 2),
            "deadlines_over_workers_s": hung * timeout / workers, "results": len(done)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    result = {
        **describe(),
        "gsm8k": rate(GSM8K(), *gsm8k(4_000)),
        "math_groups_of_8": rate(Math(workers=given.workers), *math(4_000, 8)),
        "math_all_different": rate(Math(workers=given.workers), *math(2_000, 1)),
        "poisoned": poisoned(100, given.workers, 1.0),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
