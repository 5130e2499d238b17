"""How much a policy learns: pass@1 on the test prompts before and after ``fit``, for several seeds.

    python benchmarks/learning.py --seeds 0 1 2 --output OUT.json -- --config configs/tiny.yaml

Arguments behind ``--`` are those of ``qerl-pl fit``. Each seed runs in a process of its own.
"""

import argparse
import json
import multiprocessing
import os
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from qerl_pl.bench.log import series
from qerl_pl.bench.machine import describe

CURVES = ("reward", "validation/pass@1", "entropy", "noise/sigma", "noise/kl", "sampling/logp_difference/mean",
          "sampling/kl", "grad_norm", "completions/mean_length", "tokens_per_second/rollout",
          "step_time/rollout", "step_time/update")  # fmt: skip


def run(seed: int, args: list[str]) -> dict[str, Any]:
    """One row of the result."""
    import torch

    from qerl_pl.demo import learn

    sys.argv = sys.argv[:1]
    learned = learn([*args, "--seed_everything", str(seed)])
    recorded = series(learned.folder)
    row = {
        "seed": seed, "problems": learned.problems, "before": (learned.before.value, learned.before.half_width),
        "after": (learned.after.value, learned.after.half_width),
        "fit_seconds": round(learned.seconds, 1),
        "peak_process_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "curves": {n: [[step, float(f"{v:.4g}")] for step, v in recorded[n]] for n in CURVES if n in recorded},
    }  # fmt: skip
    if torch.cuda.is_available():
        row["peak_torch_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--commit", help="if this is no git checkout")
    parser.add_argument("fit", nargs=argparse.REMAINDER, help="-- and the arguments of qerl-pl fit")
    options = parser.parse_args()
    args = options.fit[1:] if options.fit[:1] == ["--"] else options.fit
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command line does
    rows = []
    for seed in options.seeds:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            rows.append(pool.submit(run, seed, args).result())
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(
            json.dumps(describe(options.commit) | {"arguments": args, "rows": rows}, indent=1) + "\n"
        )
    print(f"\n| seed | problems | before | after | fit, s | peak, GB |\n{'| --- ' * 6}|")
    for r in rows:
        (b, bw), (a, aw) = r["before"], r["after"]
        print(
            f"| {r['seed']} | {r['problems']} | {b:.1%} ± {bw:.1%} | {a:.1%} ± {aw:.1%} "
            f"| {r['fit_seconds']:.0f} | {r['peak_process_gb']} |"
        )


if __name__ == "__main__":
    main()
