"""What the folder says of itself: README.md, quality.md and quality.png, all from quality.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qerl_pl.evaluation_plot import BASE, GREY, POLICY
from qerl_pl.evaluation_table import markdown, percent

ALGORITHM = {
    "awq": "AWQ (arXiv 2306.00978) by llm-compressor, weights then rounded to nearest",
    "gptq": "GPTQ (arXiv 2210.17323) by llm-compressor",
    "rtn": "rounding to nearest, by qerl-pl; no calibration",
}


def interval(estimate: Mapping[str, float], digits: int = 4, sign: str = "") -> str:
    """``0.0612 (0.0544 to 0.0680)``."""
    value, low, high = (f"{estimate[key]:{sign}.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def summary(quality: Mapping[str, Any]) -> str:
    """The numbers as two tables."""
    held = quality["held_out"]
    p, h = held["perplexity"], held["entropy"]
    change = f"{100 * (p['quantized'] / p['base'] - 1):+.1f} %"
    lines = [["", "base", "quantized", "change"]]
    lines.append(["perplexity, held-out text", f"{p['base']:.3f}", f"{p['quantized']:.3f}", change])
    lines.append(["KL(base ‖ quantized), nats a token (95 %)", "", interval(held["kl"]), ""])
    lines.append(
        ["entropy, held-out text, nats", *(f"{h[k]:.4f}" for k in ("base", "quantized")),
         f"{h['quantized'] - h['base']:+.4f}"]
    )  # fmt: skip
    if (own := quality.get("sampling_entropy")) is not None:
        cells = [interval(own["base"]), interval(own["quantized"]), interval(own["difference"], sign="+")]
        lines.append(["entropy, own samples at T = 1, nats (95 %)", *cells])
    for name, task in quality.get("tasks", {}).items():
        cells = [f"{100 * task[k]['value']:.1f} %" for k in ("a", "b")]
        lines.append([f"{name}, pass@1", *cells, percent(task["difference"], "+")])
    kinds = quality["weight_error"]
    errors = [["relative error", *kinds], ["‖Ŵ − W‖ / ‖W‖", *(f"{100 * e['mean']:.2f} %" for e in kinds.values())]]
    return f"{markdown(lines)}\n\n{markdown(errors)}"


def how(made: Mapping[str, Any], quality: Mapping[str, Any]) -> str:
    """What the numbers were measured on, in sentences."""
    held, own = made["held_out"], quality.get("sampling_entropy")
    said = f"Held-out text: {held['sequences']} × {held['length']:,} tokens of {held['source']}, {held['why']}. "
    said += f"Order of texts, and samples, by seed {held['seed']}. "
    said += f"Arithmetic: {quality['arithmetic']}. "
    if own is not None:
        said += f"Own samples: {own['prompts']} held-out prompts, at most {own['max_tokens']} tokens. "
    return said + "Intervals are over sequences, or prompts."


def beside(made: Mapping[str, Any], quality: Mapping[str, Any]) -> str:
    """The base of the report, if it is not what the checkpoint was made from."""
    return "" if _base(quality["base"]) == _base(made["model"]) else f"beside {quality['base']}"


def _base(model: str) -> str | Path:
    """A folder by its path, since ``m`` and ``./m/`` are one; a name of the hub, and ``tiny``, as text."""
    folder = Path(model).expanduser()
    return folder.resolve() if model != "tiny" and folder.is_dir() else model


def report(made: Mapping[str, Any], quality: Mapping[str, Any]) -> str:
    title = f"# {made['format']} of {made['model']} {beside(made, quality)}".strip()
    return f"{title}\n\n{summary(quality)}\n\n{how(made, quality)}\n"


def card(made: Mapping[str, Any], quality: Mapping[str, Any] | None) -> str:
    """The model card of a folder made by ``quantize``; without ``quality`` while there is no report."""
    calibration, sizes = made["calibration"], made["bytes"]
    lines = [["what", "value"]]
    lines.append(["base model", made["model"]])
    lines.append(["format", f"{made['format']}: {made['stored_as']}; embeddings, norms, biases and head as they were"])
    lines.append(["algorithm", ALGORITHM[made["algorithm"]]])
    lines += [[f"{made['algorithm']}: {name}", str(value)] for name, value in made["settings"].items()]
    if calibration is not None:
        lines.append(
            ["calibration", f"{calibration['sequences']} sequences × {calibration['length']:,} = "
             f"{calibration['tokens']:,} tokens of {calibration['source']}, {calibration['texts']} texts "
             f"in the order of seed {calibration['seed']}"]
        )  # fmt: skip
    lines.append(["tensors, before and after", " → ".join(f"{sizes[k] / 1e9:.3f} GB" for k in ("before", "after"))])
    lines.append(["date, machine", f"{made['date']}, {made['machine']}"])
    lines.append(["versions", ", ".join(f"{k} {v}" for k, v in made["versions"].items())])
    lines.append(["command", f"`{made['command']}`"])
    warned = "".join(f"\n- llm-compressor: {text}" for text in made["warnings"])
    head = f"---\nbase_model: {made['model']}\ntags: [quantized, {made['format']}, qerl-pl]\n---\n"
    use = f"qerl-pl fit --config configs/gsm8k_0.5b.yaml --model.model {made['output']}"
    use += f" --model.quantization {made['format']}"
    use += f" --model.quantization.group_size {made['group_size']}" if made.get("group_size") else ""
    heading, found = "## Quality", "no report yet: `qerl-pl quantize --report`"
    if quality is not None:
        heading = ", ".join(filter(None, [heading, beside(made, quality)]))
        found = f"{summary(quality)}\n\n{how(made, quality)}"
    title = f"{head}# {made['model']} in {made['format']}"
    config = "Data, rewards and length of a run are the config's: take one of qerl-pl's `configs/`, or your own."
    return f"{title}\n\n{markdown(lines)}\n{warned}\n\n{config}\n\n```bash\n{use}\n```\n\n{heading}\n{found}\n"


def draw(made: Mapping[str, Any], quality: Mapping[str, Any], target: Path) -> None:
    """Error by layer, KL by sequence, entropies. ImportError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("matplotlib is not installed; pip install 'qerl-pl[plot]'") from error
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    weights, kl, entropy = figure.subplots(1, 3, width_ratios=[2, 1.3, 1])
    for kind, errors in quality["weight_error"].items():
        weights.plot(range(len(errors["by_layer"])), [100 * e for e in errors["by_layer"]], label=kind, linewidth=1)
    weights.set_title("error of weights, %", loc="left", fontweight="bold")
    weights.set_xlabel("layer")
    weights.xaxis.get_major_locator().set_params(integer=True)
    weights.set_ylim(0, 115 * max(max(errors["by_layer"]) for errors in quality["weight_error"].values()))
    weights.legend(frameon=False, fontsize=7, ncols=2)
    held = quality["held_out"]
    kl.hist(held["kl_by_sequence"], bins=20, color=POLICY)
    kl.axvline(held["kl"]["value"], color="#111827", linewidth=0.9)
    kl.set_ylabel("sequences")
    kl.set_title(f"KL a token: {held['kl']['value']:.4f}", loc="left", fontweight="bold")
    kl.set_xlabel("nats, mean of a held-out sequence")
    kl.locator_params(axis="x", nbins=4)
    pairs = {"held-out": {k: {"value": v} for k, v in held["entropy"].items()}}
    if (own := quality.get("sampling_entropy")) is not None:
        pairs["own samples"] = own
    for x, pair in enumerate(pairs.values()):
        for shift, name, color in ((-0.2, "base", BASE), (0.2, "quantized", POLICY)):
            e = pair[name]
            ends = [[e["value"] - e["low"]], [e["high"] - e["value"]]] if "low" in e else None
            entropy.bar(x + shift, e["value"], 0.36, color=color, label=name if not x else None)
            entropy.errorbar(x + shift, e["value"], ends, color="#111827", linewidth=0.9, capsize=2)
    entropy.set_xticks(range(len(pairs)), list(pairs))
    entropy.set_title("entropy, nats", loc="left", fontweight="bold")
    shown = [e for pair in pairs.values() for e in (pair["base"], pair["quantized"])]
    entropy.set_ylim(0, 1.25 * max(e.get("high", e["value"]) for e in shown))  # room for the legend
    entropy.legend(frameon=False, fontsize=7, ncols=2, loc="upper left")
    for axis in (weights, kl, entropy):
        axis.spines[["top", "right"]].set_visible(False)
    shown_of = [made["model"], made["format"], made["algorithm"], beside(made, quality)]
    figure.supxlabel(" · ".join(filter(None, shown_of)), fontsize=7, color=GREY)
    figure.savefig(target, dpi=120)
