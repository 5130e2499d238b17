"""A few optimizer steps of a real model on this machine: is the loss finite, the adapter delivered, the engine in step?

    python benchmarks/real_models.py --output OUT.json NAME=FOLDER [NAME=FOLDER ...] --data GSM8K.jsonl

Each model runs ``qerl-pl fit`` with NVFP4, LoRA, AQN and vLLM in a process of its own.
"""

import argparse
import json
import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from qerl_pl.bench.log import series
from qerl_pl.bench.machine import describe

SHOWN = (
    "loss", "grad_norm", "reward", "entropy", "sampling/logp_difference/mean", "sampling/logp_difference/max",
    "sampling/kl", "noise/kl", "noise/realised_sigma", "sync/adapter_difference", "completions/mean_length",
    "tokens_per_second/rollout", "step_time/rollout", "step_time/update",
)  # fmt: skip


def digits(completions: list[str]) -> list[float]:
    """Share of digits: completions this short rarely reach an answer, and without spread there is no gradient."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def run(name: str, folder: str, data: str, engine: str, steps: int) -> dict[str, Any]:
    from qerl_pl.callbacks.adapter import run_folder
    from qerl_pl.lightning_cli import QeRLCLI

    source = {"class_path": "file", "init_args": {"path": data, "limit": 32}}
    settings = {
        "model.model": folder, "model.noise": "constant", "model.warmup": 0.0,
        "model.optimizer": json.dumps({"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-4}}),
        "model.tokens_per_micro_batch": 2048,
        "data.engine": engine, "data.answer_format": "boxed",
        "data.rewards": "[gsm8k, {class_path: python, init_args: {function: real_models.digits, weight: 0.1}}]",

        "data.prompts_per_batch": 2, "data.num_generations": 2, "data.max_completion_length": 48,
        "data.train": json.dumps(source), "data.validation": "null", "data.test": "null",
        "trainer.max_steps": steps, "trainer.limit_val_batches": 0, "trainer.logger.save_dir": "runs/real_models",
    }  # fmt: skip
    started = time.perf_counter()
    cli = QeRLCLI(args=[f"--{key}={value}" for key, value in settings.items()], run=False)
    cli.trainer.fit(cli.model, cli.datamodule)
    seconds = time.perf_counter() - started
    folder_of_run = run_folder(cli.trainer)
    recorded = series(folder_of_run)
    sample = json.loads((folder_of_run / "completions.jsonl").read_text().splitlines()[0])
    return {
        "model": name,
        "engine": engine,
        "seconds": round(seconds, 1),
        "peak_process_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "steps": {key: [float(f"{value:.4g}") for _, value in recorded[key]] for key in SHOWN},
        "sample": {"prompt": sample["prompt"], "completion": sample["completion"]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--data", required=True)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for model in options.models:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            rows.append(pool.submit(run, *model.split("=", 1), options.data, options.engine, options.steps).result())
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(describe() | {"rows": rows}, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
