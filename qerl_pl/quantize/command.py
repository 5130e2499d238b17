"""``qerl-pl quantize``: the command line, what is checked first, and the order of things."""

import argparse
import difflib
import importlib
import inspect
import json
import math
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qerl_pl.bench.machine import checkout, facts
from qerl_pl.checkpoint import PROJECTIONS, Weights, prepare, projection, readable, resolve, write
from qerl_pl.quantize import card
from qerl_pl.quantize.calibrated import ALGORITHMS, calibrate, check_algorithm, settings
from qerl_pl.quantize.calibration import DEFAULT, Content, Sequences, Source, draw, encode
from qerl_pl.quantize.quality import Checkpoint, assess, unquantized
from qerl_pl.random_model import is_random
from qerl_pl.stored import StoredOtherwiseError, stored_as
from registry.prompts import PROMPTS
from registry.quantization import FORMATS, QuantFormat

HEADROOM = 64 << 20
"""Bytes of the output folder beside tensors: tokenizer, report, picture."""


def quantize(args: Sequence[str]) -> None:
    """Make a checkpoint and its report; with ``--report``, only the report."""
    given = _parser().parse_args(args)
    if given.algorithm not in ALGORITHMS:
        close = difflib.get_close_matches(given.algorithm, ALGORITHMS, n=1)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown algorithm {given.algorithm!r}.{meant} Choose from {', '.join(ALGORITHMS)}")
    for name in ("num_samples", "max_length", "held_out"):
        if getattr(given, name) < 2:
            raise ValueError(f"--{name} {getattr(given, name)} must be at least 2")
    if given.sample_prompts < 0 or given.sample_prompts == 1:
        raise ValueError(f"--sample_prompts {given.sample_prompts} must be 0, or at least 2 for an interval")
    for name, least in (("sample_tokens", 1), ("seed", 0)):
        if getattr(given, name) < least:
            raise ValueError(f"--{name} {getattr(given, name)} must be at least {least}")
    if (given.report is None) == (given.output is None):
        raise ValueError(
            "give one of --output DIR, to quantize, and --report DIR, to report on a checkpoint that is there"
        )
    if given.task is not None and not given.task.is_file():
        raise ValueError(f"--task {given.task}: there is no such file; name a config of qerl-pl test")
    FORMATS.load_plugins()
    PROMPTS.load_plugins()
    quantization = _format(given.format, given.group_size)
    base = resolve(given.model)
    if given.report is not None:
        _report_on(given, base, quantization)
    else:
        _make(given, base, quantization, args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "qerl-pl quantize", description="Quantize a model, calibrated or by rounding, and report what that did to it."
    )
    add = parser.add_argument
    add("--model", required=True, help="BF16 model: a folder, a name on the hub, or tiny")
    add("--format", default="nvfp4", help="a weight format; default: nvfp4")
    add("--group_size", type=int, help="weights that share a scale, for formats that have a choice (int4, int8)")
    add("--algorithm", default="awq", help="awq (default), gptq, or rtn: rounding to nearest, without calibration")
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


def _format(name: str, group_size: int | None) -> QuantFormat:
    cls = _class(name) if "." in name else FORMATS[name]
    if group_size is None:
        return cls()
    if "group_size" not in inspect.signature(cls).parameters:
        raise ValueError(f"--group_size {group_size}: {name} leaves no choice; remove it")
    return cls(group_size=group_size)  # type: ignore[call-arg]


def _class(path: str) -> type[QuantFormat]:
    """A format of a user's own by its import path."""
    module, _, leaf = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), leaf)
    except (ImportError, AttributeError) as error:
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
    texts = _texts(given, base, calibrated=given.algorithm != "rtn")
    unfinished = parent / f".{output.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
    unfinished.mkdir()
    try:
        warnings: list[str] = []
        if given.algorithm == "rtn":
            _say(f"rounding {base} to {given.format}")
            write(base, json.loads((base / "config.json").read_text()), quantization, unfinished)
        else:
            chosen = texts.sequences["calibration"]
            _say(f"{given.algorithm} of {base} to {given.format} on {_device()}: {chosen.count:,} tokens")
            warnings = calibrate(base, quantization, given.algorithm, chosen.tokens, unfinished, _say)
            for text in warnings:
                _say(f"llm-compressor: {text}")
        assert prepare(str(unfinished), quantization) == unfinished  # fit takes it as it is
        made = {
            "model": given.model, "format": given.format, "group_size": given.group_size,
            "stored_as": stored_as(quantization.config), "algorithm": given.algorithm,
            "settings": settings(given.algorithm), "output": str(output),
            "calibration": texts.calibration(given), "held_out": texts.held_out(given), "seed": given.seed,
            "bytes": {"before": before, "after": sum(f.stat().st_size for f in unfinished.glob("*.safetensors"))},
            "seconds": round(time.perf_counter() - started, 1), "warnings": warnings,
            "command": shlex.join(["qerl-pl", "quantize", *args]), "commit": checkout(), **facts(),
        }  # fmt: skip
        _write(unfinished, made, None)
        readable(unfinished)
        unfinished.rename(output)
    except KeyboardInterrupt:
        _say(f"stopped; nothing is left of {output}")
        raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    _finish(given, base, Checkpoint(output, quantization), texts, made)


def _report_on(given: argparse.Namespace, base: Path, quantization: QuantFormat) -> None:
    check_model(given.model, base, quantization)
    if not (given.report / "config.json").is_file():
        raise ValueError(f"--report {given.report} is no folder of a model; name one that holds config.json")
    try:
        prepare(str(given.report), quantization)
    except StoredOtherwiseError as error:
        raise ValueError(
            f"--report {given.report} is stored as {error.found!r}, which is not --format {given.format}; "
            + error.fix("give --format {}", "--{} {}")
        ) from error
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (base, given.report))
    if ours["vocab_size"] != theirs["vocab_size"] or ours["hidden_size"] != theirs["hidden_size"]:
        raise ValueError(f"--model {given.model} is not the base of --report {given.report}: their sizes differ")
    earlier = given.report / "quality.json"
    made = json.loads(earlier.read_text())["made"] if earlier.is_file() else {}
    texts = _texts(given, base, calibrated=False)
    used = made.get("calibration") or {}
    same = (used.get("source"), used.get("seed")) == (given.calibration, given.seed)
    if same and used["positions"][0] < texts.sequences["held_out"].texts[1]:
        raise ValueError(
            f"--held_out {given.held_out} × {given.max_length} reaches into the texts that {given.report} was "
            f"calibrated on (from {used['positions'][0]} on); lower it, or name other texts with --calibration"
        )
    held = texts.held_out(given)
    if not same:
        held["why"] = "whether the checkpoint was calibrated on them is not known"
    if not made:
        made = {"model": given.model, "format": given.format, "algorithm": "not known"}
    _finish(given, base, Checkpoint(given.report, quantization), texts, made | {"held_out": held})


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


class _Texts:
    """What was drawn, and what the card says of it."""

    def __init__(self, sequences: Mapping[str, Sequences], prompts: list[list[int]]) -> None:
        self.sequences, self.prompts = sequences, prompts

    def calibration(self, given: argparse.Namespace) -> dict[str, Any] | None:
        if (drawn := self.sequences.get("calibration")) is None:
            return None
        return self._said(given, drawn)

    def held_out(self, given: argparse.Namespace) -> dict[str, Any]:
        why = "drawn first in the shuffled order, so that no text of theirs calibrated"
        return self._said(given, self.sequences["held_out"]) | {"why": why}

    @staticmethod
    def _said(given: argparse.Namespace, drawn: Sequences) -> dict[str, Any]:
        return {
            "source": given.calibration, "seed": given.seed, "sequences": len(drawn.tokens),
            "length": len(drawn.tokens[0]), "tokens": drawn.count, "texts": drawn.used, "positions": list(drawn.texts),
        }  # fmt: skip


def _texts(given: argparse.Namespace, base: Path, calibrated: bool) -> _Texts:
    from transformers import AutoTokenizer

    longest = json.loads((base / "config.json").read_text()).get("max_position_embeddings")
    if longest is not None and given.max_length > longest:
        raise ValueError(
            f"--max_length {given.max_length} is more than the {longest} tokens that the model knows; "
            f"give --max_length {longest}"
        )
    tokenizer = AutoTokenizer.from_pretrained(base)
    wanted = {"held_out": (given.held_out, given.max_length)}
    if calibrated:
        wanted["calibration"] = (given.num_samples, given.max_length)
    sequences, contents = draw(tokenizer, Source(given.calibration, given.seed), wanted)
    asked: list[Content] = [c[:-1] for c in contents["held_out"] if not isinstance(c, str) and len(c) > 1]
    encoded = [encode(tokenizer, c, generate=True) for c in asked]
    fitting = [p for p in encoded if len(p) + given.sample_tokens <= (longest or math.inf)]
    if len(fitting) < given.sample_prompts:
        _say(
            f"{len(fitting)} held-out prompts to sample from, not {given.sample_prompts}: {len(encoded)} of the texts "
            f"have one, and with --sample_tokens {given.sample_tokens} it must fit into the model's {longest} tokens"
        )
    return _Texts(sequences, fitting[: given.sample_prompts])


def _finish(
    given: argparse.Namespace, base: Path, quantized: Checkpoint, texts: _Texts, made: Mapping[str, Any]
) -> None:
    """The report into the folder of the checkpoint, and onto the console."""
    device = "cpu" if _device() == "the CPU" else "cuda"
    held, tokens = texts.sequences["held_out"].tokens, given.sample_tokens
    quality = assess(unquantized(base), quantized, held, texts.prompts, tokens, given.seed, device, _say)
    if given.task is not None:
        quality["tasks"] = _tasks(given, base, quantized.folder, quantized.folder)
    _write(quantized.folder, made, quality)
    print(card.report(made, quality) + f"\n{quantized.folder}")


def _tasks(given: argparse.Namespace, base: Path, quantized: Path, folder: Path) -> dict[str, Any]:
    """pass@1 of both by ``qerl-pl test``, paired; its results stay as ``task/{base,quantized}.json``."""
    from qerl_pl.comparison import compare, read

    (folder / "task").mkdir(exist_ok=True)
    for name, model, format_ in (("base", base, "bf16"), ("quantized", quantized, given.format)):
        _say(f"report: {given.task} with the {name} model")
        with tempfile.TemporaryDirectory() as runs:
            chosen = ["--model.model", str(model.absolute()), "--model.quantization", format_, "--adapter", "none"]
            if name == "quantized" and given.group_size is not None:
                chosen += ["--model.quantization.group_size", str(given.group_size)]
            place = ["--trainer.logger.save_dir", runs]
            command = [sys.executable, "-m", "qerl_pl", "test", "--config", str(given.task), *chosen, *place]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            found = list(Path(runs).rglob("results/test.json"))
            if done.returncode or len(found) != 1:
                said = done.stdout.strip().splitlines()
                raise ValueError(f"--task {given.task}: qerl-pl test failed: {said[-1] if said else done.returncode}")
            shutil.copy(found[0], folder / "task" / f"{name}.json")
    first, second = (read(folder / "task" / f"{name}.json") for name in ("base", "quantized"))
    return {name: asdict(difference) for name, difference in compare(first, second).items()}


def _write(folder: Path, made: Mapping[str, Any], quality: Mapping[str, Any] | None) -> None:
    """quality.json, the card of a checkpoint of ours, and with ``quality`` its table and picture."""
    both = {"made": made, "quality": quality}
    (folder / "quality.json").write_text(json.dumps(both, indent=1, ensure_ascii=False) + "\n")
    if "command" in made:
        (folder / "README.md").write_text(card.card(made, quality))
    if quality is None:
        return
    (folder / "quality.md").write_text(card.report(made, quality))
    try:
        card.draw(made, quality, folder / "quality.png")
    except ImportError as error:
        _say(f"no quality.png: {error}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
