"""What each weight format does to one model before training, and that the same ``fit`` runs with it.

    python benchmarks/formats.py --model Qwen2.5-Coder-0.5B-Instruct --texts gsm8k/test.jsonl \
        --output OUT.json -- --config configs/gsm8k_0.5b.yaml

Arguments behind ``--`` are those of ``qerl-pl fit``. Weights are rounded to nearest. Each format runs in a process of
its own: pass@1 on the test prompts, entropy of its own samples at several temperatures, a few steps of ``fit``, and KL
to BF16 on ``--texts``. All formats sample the same prompts, so that differences to BF16 are paired. A second call with
the same ``--output`` adds rows, and replaces those of the same model, format and settings.
"""

import argparse
import multiprocessing
import os
import shlex
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from qerl_pl.bench.log import series
from qerl_pl.bench.results import Results, choices, device
from registry.quantization import FORMATS

CHUNK = 32  # completions that go through the model at once
SETTINGS = ("texts", "sequences", "length", "temperatures", "prompts", "samples", "steps")
"""What makes rows of one model and format different, beside the arguments of ``fit``."""


def alone(name: str, options: argparse.Namespace, held: list[list[int]]) -> dict[str, Any]:
    """``run`` in a process of its own; if it fails, or is killed, that is its row."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(run, name, options, held).result()
        except Exception as error:
            return {"format": name, "error": f"{type(error).__name__}: {error}"}


def run(name: str, options: argparse.Namespace, held: list[list[int]]) -> dict[str, Any]:
    """One row of the result. held: [N][length] token ids for KL."""
    from qerl_pl.checkpoint import prepare, resolve
    from qerl_pl.demo import quiet_cli
    from qerl_pl.quantize.quality import Checkpoint, mean, unquantized, weight_errors

    sys.argv = sys.argv[:1]
    args = [*options.fit, f"--model.model={options.model}", f"--model.quantization={name}"]
    try:
        cli = quiet_cli([*args, f"--trainer.max_steps={options.steps}", "--trainer.limit_val_batches=0"])
    except SystemExit as error:
        raise ValueError("the settings were refused, see above") from error
    (tested,) = cli.trainer.test(cli.model, cli.datamodule, verbose=False)
    entropies = {t: sample(cli, options, float(t)) for t in options.temperatures.split(",")}
    began = time.perf_counter()
    cli.trainer.fit(cli.model, cli.datamodule)
    seconds = time.perf_counter() - began
    cli.datamodule.engine.close()
    quantization = cli.model.quantization
    base = unquantized(resolve(options.model))
    quantized = Checkpoint(prepare(options.model, quantization), quantization)
    errors = {} if name == "bf16" else weight_errors(base, quantized, device()[0])
    rate = {key: tested[f"test/pass@1{end}"] for key, end in (("value", ""), ("low", "_low"), ("high", "_high"))}
    return {
        "format": name, "bits_per_weight": quantization.bits_per_weight,
        "bytes": sum(file.stat().st_size for file in quantized.folder.glob("*.safetensors")),
        "weight_error": fmean(e for kind in errors.values() for e in kind) if errors else 0.0,
        "weight_error_by_kind": {kind: fmean(e) for kind, e in errors.items()},
        "kl": asdict(mean(divergence(base, quantized, held), least=0.0)),
        "pass@1": rate,
        "entropy": {t: asdict(mean(values)) for t, values in entropies.items()},
        "entropy_by_prompt": {t: [float(f"{v:.4g}") for v in values] for t, values in entropies.items()},
        "fit": {"seconds": round(seconds, 1), **logged(cli)},
    }  # fmt: skip


def sample(cli: Any, options: argparse.Namespace, temperature: float) -> list[float]:
    """Entropy (nats a token) of the distribution that is sampled from, one number a prompt of the test set."""
    import torch

    from qerl_pl.rollouts import collate
    from qerl_pl.seeds import derive_seed
    from qerl_pl.types import Sampling

    data, policy = cli.datamodule, cli.model.policy
    device = next(policy.parameters()).device  # Lightning calls the module's the CPU between two stages
    prompts = data.prompts("test", next(iter(data.sets("test"))))
    prompts = [prompts[i] for i in range(min(options.prompts, len(prompts)))]
    sampling = Sampling(options.samples, data.eval_sampling.max_tokens, temperature)
    seeds = [derive_seed("entropy", i) for i in range(len(prompts))]
    groups = data.engine.generate([p.token_ids for p in prompts], sampling, seeds)
    batch = collate([p for p in prompts for _ in range(sampling.n)], [c for group in groups for c in group])
    sums = []
    for start in range(0, len(batch.lengths), CHUNK):
        part = slice(start, start + CHUNK)
        rows = [t[part].to(device) for t in (batch.tokens, batch.lengths, batch.completion_mask)]
        with torch.no_grad():
            sums.append(policy(*rows, temperature=temperature)[1].sum(1).cpu())
    tokens = batch.completion_mask.sum(1).view(-1, sampling.n).sum(1)
    return list((torch.cat(sums).view(-1, sampling.n).sum(1) / tokens).tolist())


def held_out(options: argparse.Namespace) -> list[list[int]]:
    """The sequences of ``--texts``; ValueError if there are too few."""
    from transformers import AutoTokenizer

    from qerl_pl.checkpoint import resolve_option
    from qerl_pl.quantize.calibration import Source, draw

    folder = resolve_option(options.model)
    wanted = {"held_out": (options.sequences, options.length)}
    try:
        source = Source(options.texts, 0)
        drawn, _ = draw(AutoTokenizer.from_pretrained(folder), source, wanted, "--sequences or --length")
    except ValueError as error:
        raise ValueError(f"--texts {options.texts}: {error}") from error
    return drawn["held_out"].tokens


def divergence(base: Any, quantized: Any, held: list[list[int]]) -> list[float]:
    """KL(BF16 || format) of the next token in nats, one number a sequence."""
    import torch

    from qerl_pl.quantize.quality import compare, hidden_states

    where, dtype = device()
    states = [hidden_states(c, held, where, getattr(torch, dtype)) for c in (base, quantized)]
    return compare(states[0], states[1], held, where).kl


def logged(cli: Any) -> dict[str, list[float]]:
    """What ``fit`` wrote of reward, and of the difference between engine and trainer."""
    recorded = series(str(cli.trainer.log_dir))
    names = ("reward", "sampling/logp_difference/mean", "grad_norm")
    return {n: [float(f"{value:.4g}") for _, value in recorded[n]] for n in names if n in recorded}


def difference(row: dict[str, Any], base: dict[str, Any], temperature: str) -> Any:
    """The change of entropy from BF16, paired by prompt."""
    from qerl_pl.quantize.quality import mean

    pairs = zip(row["entropy_by_prompt"][temperature], base["entropy_by_prompt"][temperature], strict=True)
    return mean([ours - theirs for ours, theirs in pairs])


def table(rows: list[dict[str, Any]], temperatures: list[str]) -> str:
    base = next((row for row in rows if row["format"] == "bf16" and "error" not in row), None)
    lines = [["format", "GB", "weight error", "KL", *(f"entropy, T = {t}" for t in temperatures), "pass@1"]]
    lines.append(["---"] * len(lines[0]))
    for row in rows:
        if "error" in row:
            lines.append([row["format"], row["error"]])
            continue
        cells = [row["format"], f"{row['bytes'] / 1e9:.3f}", f"{row['weight_error']:.1%}", f"{row['kl']['value']:.4f}"]
        for t in temperatures:
            change = None if base is None or row is base else difference(row, base, t)
            cells.append(
                f"{row['entropy'][t]['value']:.3f}"
                + (f" ({change.value:+.3f} ± {change.half_width:.3f})" if change else "")
            )
        rate = row["pass@1"]
        lines.append([*cells, f"{rate['value']:.1%} ± {(rate['high'] - rate['low']) / 2:.1%}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="BF16 model: a folder or a name on the hub")
    parser.add_argument("--texts", required=True, help="held-out texts for KL, as qerl-pl quantize --calibration")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--formats", default="bf16,nvfp4,mxfp4,nf4,int4,int8,fp8")
    parser.add_argument("--temperatures", default="0.6,0.8,1.0,1.2")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="of fit")
    parser.add_argument("--parallel", type=int, default=1, help="formats at the same time")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--commit", help="if this is no git checkout")
    parser.add_argument("fit", nargs=argparse.REMAINDER, help="-- and the arguments of qerl-pl fit")
    options = parser.parse_args()
    options.fit = options.fit[1:] if options.fit[:1] == ["--"] else options.fit
    try:
        temperatures = [float(t) for t in options.temperatures.split(",")]
    except ValueError:
        parser.error(f"--temperatures {options.temperatures}: numbers with commas between them")
    if min(temperatures) <= 0:
        parser.error(f"--temperatures {options.temperatures}: entropy is that of sampling, above 0")
    for name in ("prompts", "sequences"):
        if getattr(options, name) < 2:
            parser.error(f"--{name} {getattr(options, name)}: an interval takes at least two")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command line does
    try:
        names = choices("formats", options.formats, list(FORMATS))
        results = Results("formats", options.output, options.commit)
        held = held_out(options)
    except ValueError as error:
        parser.error(str(error))
    settings = [word for name in SETTINGS for word in (f"--{name}", str(getattr(options, name)))]
    what = {"model": options.model, "options": shlex.join([*settings, "--", *options.fit])}
    with ThreadPoolExecutor(options.parallel) as pool:
        jobs = [pool.submit(alone, name, options, held) for name in names]
        for job in as_completed(jobs):
            row = job.result()
            results.add(what | {"format": row.pop("format")}, row)
    rows = sorted(results.rows, key=lambda row: names.index(row["format"]))
    print("\n" + table(rows, options.temperatures.split(",")))
    if any("error" in row for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
