"""The report of ``qerl-pl quantize``: made, written into the folder of the checkpoint, and shown."""

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qerl_pl.bench.results import device
from qerl_pl.checkpoint import prepare
from qerl_pl.quantize import card
from qerl_pl.quantize.calibration import Texts, draw_texts, why_held_out
from qerl_pl.quantize.quality import Checkpoint, assess, unquantized
from qerl_pl.quantize.task import run_task
from qerl_pl.stored import StoredOtherwiseError, fitting
from registry.quantization import QuantFormat

REPORT = "quality.json"
"""The numbers, from which all else of a report is made."""
PICTURE = "quality.png"


def stored_group_size(folder: Path, format_: str) -> int | str | None:
    """``--group_size`` of the checkpoint in ``folder``; None where it has the format's own, or another format."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"--report {folder} is no folder of a model; name one that holds config.json")
    found = json.loads((folder / "config.json").read_text()).get("quantization_config")
    if found is None:
        raise ValueError(
            f"--report {folder} is not quantized; name a checkpoint of {format_}, or make one with --output"
        )
    name, settings = fitting(found) or ("", {})
    if name != format_ or "group_size" not in settings:
        return None
    size: int | None = settings["group_size"]
    return "null" if size is None else size


def check_stored(given: argparse.Namespace, quantization: QuantFormat) -> None:
    """ValueError if the checkpoint has another format, or other settings of it, than those given."""
    try:
        prepare(str(given.report), quantization)
    except StoredOtherwiseError as error:
        raise ValueError(
            f"--report {given.report} is stored as {error.found!r}, which is not --format {given.format}; "
            + error.fix("give --format {}", "--{} {}")
        ) from error


def report_on(given: argparse.Namespace, base: Path, quantization: QuantFormat) -> None:
    """``--report``: the report of a checkpoint that is there, ours or another's, beside its base."""
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (base, given.report))
    if ours["vocab_size"] != theirs["vocab_size"] or ours["hidden_size"] != theirs["hidden_size"]:
        raise ValueError(f"--model {given.model} is not the base of --report {given.report}: their sizes differ")
    earlier = given.report / REPORT
    made = json.loads(earlier.read_text())["made"] if earlier.is_file() else {}
    if "command" not in made:  # others made it, from what is not known
        made = {"model": given.model, "format": given.format, "algorithm": "not known"}
    texts = draw_texts(base, given, 0, say)
    used = made.get("calibration") or {}
    same = _same(used.get("source", ""), given.calibration) and used.get("seed") == given.seed
    if same and used["positions"][0] < texts.sequences["held_out"].texts[1]:
        raise ValueError(
            f"--held_out {given.held_out} × {given.max_length} reaches into the texts that {given.report} was "
            f"calibrated on (from {used['positions'][0]} on); lower it, or name other texts with --calibration"
        )
    held = texts.held_out(why_held_out(made["algorithm"], same))
    stopped = f"stopped; {given.report} is as it was"
    add_report(given, base, Checkpoint(given.report, quantization), texts, made | {"held_out": held}, stopped)


def _same(source: str, other: str) -> bool:
    """Whether both name the same texts; a file has many names."""
    files = Path(source).expanduser(), Path(other).expanduser()
    return source == other or (all(file.is_file() for file in files) and files[0].samefile(files[1]))


def add_report(
    given: argparse.Namespace, base: Path, quantized: Checkpoint, texts: Texts, made: Mapping[str, Any], stopped: str
) -> None:
    """Make the report, beside the files of the checkpoint; then move it to them, and show it. ``stopped`` is said if
    that is interrupted before the first file is moved.
    """
    folder = quantized.folder
    where, _ = device()
    held, tokens = texts.sequences["held_out"].tokens, given.sample_tokens
    with tempfile.TemporaryDirectory(dir=folder, prefix=".report-") as place:
        new = Path(place)
        try:
            quality = {"base": given.model}
            if given.task is not None:  # first: check_task cannot see all that is refused, such as too little memory
                (new / "task").mkdir()
                quality["tasks"] = run_task(given, base, new / "task", say)
            quality |= assess(unquantized(base), quantized, held, texts.prompts, tokens, given.seed, where, say)
            write_report(new, made, quality)
            stopped = f"stopped while the report was moved into {folder}: part of it is of before; make it again"
            move_in(new, folder)
        except KeyboardInterrupt:
            say(stopped)
            raise
    print(card.report(made, quality) + f"\n{folder}")


def move_in(new: Path, folder: Path) -> None:
    """Put the report in ``new`` in the place of that in ``folder``. One that covers more is kept beside it."""
    earlier, later = (json.loads(f.read_text()) if f.is_file() else {} for f in (folder / REPORT, new / REPORT))
    if more := covers_more(earlier, later):
        say(f"the earlier report is kept as {keep(folder)}: it has {', '.join(more)}")
    if not (new / PICTURE).exists():  # matplotlib is missing
        (folder / PICTURE).unlink(missing_ok=True)  # a picture of other numbers
    for file in [f for f in new.rglob("*") if f.is_file()]:
        target = folder / file.relative_to(new)
        target.parent.mkdir(exist_ok=True)
        file.replace(target)


def covers_more(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> list[str]:
    """What the earlier of two ``quality.json`` has more of, in words."""
    before, after = (_extent(both) if both.get("quality") else {} for both in (earlier, later))
    return [f"{n:,} {what}, not {after.get(what, 0):,}" for what, n in before.items() if n > after.get(what, 0)]


def _extent(both: Mapping[str, Any]) -> dict[str, int]:
    quality, own = both["quality"], both["quality"].get("sampling_entropy", {})
    return {
        "held-out tokens": both["made"]["held_out"]["tokens"],
        "prompts to sample from": own.get("prompts", 0),
        "tokens a sample": own.get("max_tokens", 0),
        **{f"problems of the task {name}": task["problems"] for name, task in quality.get("tasks", {}).items()},
    }


def keep(folder: Path) -> Path:
    """Give the report in ``folder`` the next free number; the path of its numbers."""
    n = next(n for n in itertools.count(1) if not (folder / f"quality-{n}.json").exists())
    for name in (REPORT, "quality.md", PICTURE, "task"):
        if (file := folder / name).exists():
            file.rename(file.with_stem(f"{file.stem}-{n}"))
    return folder / f"quality-{n}.json"


def write_report(folder: Path, made: Mapping[str, Any], quality: Mapping[str, Any] | None) -> None:
    """quality.json, the card of a checkpoint of ours, and with ``quality`` its table and picture."""
    both = {"made": made, "quality": quality}
    (folder / REPORT).write_text(json.dumps(both, indent=1, ensure_ascii=False) + "\n")
    if "command" in made:
        (folder / "README.md").write_text(card.card(made, quality))
    if quality is None:
        return
    (folder / "quality.md").write_text(card.report(made, quality))
    try:
        card.draw(made, quality, folder / PICTURE)
    except ImportError as error:
        say(f"no {PICTURE}: {error}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
