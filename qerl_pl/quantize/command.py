"""``qerl-pl quantize``: the command line, what is checked first, and the order of things."""

import argparse
import inspect
import itertools
import json
import math
import shlex
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from qerl_pl.bench.machine import checkout, facts
from qerl_pl.checkpoint import PROJECTIONS, Weights, prepare, projection, readable, resolve_option, write
from qerl_pl.quantize.calibrated import ALGORITHMS, calibrate, check_algorithm, import_llmcompressor, settings
from qerl_pl.quantize.calibration import DEFAULT, draw_texts, why_held_out
from qerl_pl.quantize.quality import Checkpoint
from qerl_pl.quantize.report import (
    add_report,
    check_stored,
    device_name,
    report_on,
    say,
    stored_group_size,
    write_report,
)
from qerl_pl.quantize.task import check_task
from qerl_pl.random_model import is_random
from qerl_pl.stored import stored_as
from registry._import import ImportPathError, import_path
from registry._meant import meant
from registry.prompts import PROMPTS
from registry.quantization import FORMATS, QuantFormat

HEADROOM = 64 << 20
"""Bytes of the output folder beside tensors: tokenizer, report, picture."""


def quantize(args: Sequence[str]) -> None:
    """Make a checkpoint and its report; with ``--report``, only the report."""
    given = _parser().parse_args(args)
    if given.algorithm not in ALGORITHMS:
        hint = meant(given.algorithm, ALGORITHMS)
        raise ValueError(f"unknown algorithm {given.algorithm!r}.{hint} Choose from {', '.join(ALGORITHMS)}")
    for name, least in {"num_samples": 2, "max_length": 2, "held_out": 2, "sample_tokens": 1, "seed": 0}.items():
        if getattr(given, name) < least:
            raise ValueError(f"--{name} {getattr(given, name)} must be at least {least}")
    if given.sample_prompts < 0 or given.sample_prompts == 1:
        raise ValueError(f"--sample_prompts {given.sample_prompts} must be 0, or at least 2 for an interval")
    if (given.report is None) == (given.output is None):
        raise ValueError(
            "give one of --output DIR, to quantize, and --report DIR, to report on a checkpoint that is there"
        )
    FORMATS.load_plugins()
    PROMPTS.load_plugins()
    if given.report is not None:
        stored = stored_group_size(given.report, given.format)
        given.group_size = stored if given.group_size is None else given.group_size
    quantization = _format(given.format, given.group_size)
    if given.report is not None:  # first: the base may have shapes that only the right format holds
        check_stored(given, quantization)
    base = resolve_option(given.model)
    if given.task is not None:
        check_task(given, base)
    if given.report is not None:
        check_model(given.model, base, quantization)
        report_on(given, base, quantization)
    else:
        _make(given, base, quantization, args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "qerl-pl quantize", description="Quantize a model, calibrated or by rounding, and report what that did to it."
    )
    add = parser.add_argument
    add("--model", required=True, help="BF16 model: a folder, a name on the hub, or tiny")
    add("--format", default="nvfp4", help="a weight format; default: nvfp4")
    add(
        "--group_size", type=_group_size,
        help="weights that share a scale, for formats that have a choice (int4, int8); null: one scale an output",
    )  # fmt: skip
    add("--algorithm", default="gptq", help="gptq (default), awq, or rtn: rounding to nearest, without calibration")
    add("--output", type=Path, help="folder of the checkpoint; must not be there")
    add("--report", type=Path, help="only report: an existing checkpoint of --format, beside its base --model")
    add(
        "--calibration", default=DEFAULT,
        help="texts: a data set of the hub, a registered prompt source, or a .jsonl, .json, .parquet or .txt file; "
        "default: %(default)s (the paper's)",
    )  # fmt: skip
    add("--num_samples", type=int, default=256, help="calibration sequences; default: 256 (the paper's)")
    add("--max_length", type=int, default=2048, help="tokens of each sequence; default: 2048 (the paper's)")
    add("--held_out", type=int, default=32, help="sequences for the report, of other texts; default: 32")
    add("--sample_prompts", type=int, default=32, help="held-out prompts to sample from, 0: none; default: 32")
    add("--sample_tokens", type=int, default=256, help="longest sample; default: 256")
    add("--task", type=Path, help="also pass@1 of both: a config of qerl-pl test, such as configs/gsm8k_0.5b.yaml")
    add("--seed", type=int, default=0, help="of the order of texts, and of samples; default: 0")
    return parser


def _group_size(text: str) -> int | str:
    """``null`` stays a text, as configs have it: None is what was not given."""
    try:
        return text if text == "null" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number or null") from None


def _format(name: str, group_size: int | str | None) -> QuantFormat:
    cls = _class(name) if "." in name else FORMATS[name]
    if group_size is None:
        return cls()
    if "group_size" not in inspect.signature(cls).parameters:
        raise ValueError(f"--group_size {group_size}: {name} leaves no choice; remove it")
    return cls(group_size=None if group_size == "null" else group_size)  # type: ignore[call-arg]


def _class(path: str) -> type[QuantFormat]:
    """A format of a user's own by its import path."""
    try:
        found = import_path(path)
    except ImportPathError as error:
        raise ValueError(f"--format {path}: {error}; give a registered name or the import path of a class") from error
    if not (isinstance(found, type) and issubclass(found, QuantFormat)):
        raise ValueError(f"--format {path} is no subclass of QuantFormat")
    return found


def _make(given: argparse.Namespace, base: Path, quantization: QuantFormat, args: Sequence[str]) -> None:
    started = time.perf_counter()
    output: Path = given.output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output {output} is there and not empty; name another folder, or remove it")
    before, after = check_model(given.model, base, quantization)
    check_algorithm(quantization, given.format, given.algorithm)
    parent = output.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if free < after + HEADROOM:
        raise ValueError(
            f"--output {output}: the checkpoint takes {after / 1e9:.2f} GB, but {parent} has {free / 1e9:.2f} GB free; "
            "make room, or name a folder elsewhere"
        )
    texts = draw_texts(base, given, 0 if given.algorithm == "rtn" else given.num_samples, say)
    if given.algorithm != "rtn":
        import_llmcompressor(given.algorithm)
    unfinished = parent / f".{output.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
    unfinished.mkdir()
    try:
        warnings: list[str] = []
        if given.algorithm == "rtn":
            say(f"rounding {base} to {given.format}")
            write(base, json.loads((base / "config.json").read_text()), quantization, unfinished)
        else:
            chosen = texts.sequences["calibration"]
            say(f"{given.algorithm} of {base} to {given.format} on {device_name()}: {chosen.count:,} tokens")
            warnings = calibrate(base, quantization, given.algorithm, chosen.tokens, unfinished, say)
            for text in warnings:
                say(f"llm-compressor: {text}")
        assert prepare(str(unfinished), quantization) == unfinished  # fit takes it as it is
        made = {
            "model": given.model, "format": given.format, "group_size": given.group_size,
            "stored_as": stored_as(quantization.config), "algorithm": given.algorithm,
            "settings": settings(given.algorithm), "output": str(output),
            "calibration": texts.calibration(), "held_out": texts.held_out(why_held_out(given.algorithm, same=True)),
            "seed": given.seed,
            "bytes": {"before": before, "after": sum(f.stat().st_size for f in unfinished.glob("*.safetensors"))},
            "seconds": round(time.perf_counter() - started, 1), "warnings": warnings,
            "command": shlex.join(["qerl-pl", "quantize", *args]), "commit": checkout(), **facts(),
        }  # fmt: skip
        write_report(unfinished, made, None)
        readable(unfinished)
        unfinished.rename(output)
    except KeyboardInterrupt:
        say(f"stopped; nothing is left of {output}")
        raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    stopped = f"stopped; the checkpoint in {output} is complete, and this makes its report: {_report_command(given)}"
    add_report(given, base, Checkpoint(output, quantization), texts, made, stopped)


def _report_command(given: argparse.Namespace) -> str:
    """The command for the report alone, with the settings that were given."""
    chosen = vars(given) | {"report": given.output}
    for name in ("output", "algorithm", "num_samples"):  # of making the checkpoint
        del chosen[name]
    parser = _parser()
    words = [[f"--{k}", str(v)] for k, v in chosen.items() if v != parser.get_default(k)]
    return shlex.join(["qerl-pl", "quantize", *itertools.chain(*words)])


def check_model(name: str, folder: Path, quantization: QuantFormat) -> tuple[int, int]:
    """Bytes of the tensors as they are and as they will be; ValueError if this model cannot have this format."""
    if quantization.config is None:
        raise ValueError(f"--format {type(quantization).__name__.lower()} is no quantization; choose another format")
    config = json.loads((folder / "config.json").read_text())
    if is_random(folder):
        raise ValueError(f"--model {name} has random weights: nothing to calibrate; name a trained model")
    if (found := config.get("quantization_config")) is not None:
        raise ValueError(f"--model {name} is quantized already ({stored_as(found)}); name the BF16 model it came from")
    weights = Weights(folder)
    before, after = sum(f.stat().st_size for f in folder.glob("*.safetensors")), 0
    blocks: dict[str, set[str]] = {}
    for tensor in weights:
        module, key = projection(tensor) or ("", "")
        if key != "weight":
            after += weights[tensor].nbytes
            continue
        shape = weights.shape(tensor)
        quantization.check(module, shape[1])
        layout = quantization.layout(*shape).values()
        after += sum(math.prod(stored) * dtype.itemsize for stored, dtype in layout)
        blocks.setdefault(module.partition(".layers.")[2].partition(".")[0], set()).add(module.rpartition(".")[2])
    layers = config.get("num_hidden_layers", 0)
    lacking = {str(i): sorted(set(PROJECTIONS) - blocks.get(str(i), set())) for i in range(layers)}
    bad = next((f"layer {i} lacks {', '.join(names)}" for i, names in lacking.items() if names), None)
    if bad or not layers:
        raise ValueError(
            f"--model {name} ({config.get('model_type', 'unknown architecture')}): {bad or 'it has no layers'}; Qwen2, "
            "Qwen3 and Llama style decoders have all of " + ", ".join(PROJECTIONS)
        )
    return before, after
