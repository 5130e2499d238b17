"""What the tests of qerl-pl quantize share: the embedded model, quantized once by each algorithm."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl_pl.checkpoint import Weights, resolve
from qerl_pl.cli import main
from qerl_pl.quantize.calibration import Source, draw
from registry.prompts.arithmetic import Arithmetic, worked_solution
from tests.reference import dequantize_nvfp4

TINY = resolve("tiny")
LENGTH, HELD_OUT, SAMPLES = 96, 4, 12
KEYS = ("weight_packed", "weight_scale", "weight_global_scale")
PROJECTIONS = [
    f"model.layers.{i}.{name}"
    for i in range(5)
    for name in (*(f"self_attn.{p}_proj" for p in "qkvo"), *(f"mlp.{p}_proj" for p in ("gate", "up", "down")))
]


def write_texts(path: Path) -> Path:
    """Problems of the embedded task with worked solutions, as the embedded model was trained on."""
    source = Arithmetic("train", size=200)
    rows = [{"prompt": row["prompt"], "solution": worked_solution(source.problem(i))} for i, row in enumerate(source)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def quantize_tiny(texts: Path, folder: Path) -> dict[str, Path]:
    """Algorithm -> checkpoint in NVFP4."""
    with pytest.MonkeyPatch.context() as patch:
        for algorithm in ("rtn", "gptq", "awq"):
            run(arguments(texts, algorithm=algorithm, output=folder / algorithm), patch)
    return {name: folder / name for name in ("rtn", "gptq", "awq")}


def arguments(texts: Path, **more: object) -> list[str]:
    given = {
        "model": "tiny", "algorithm": "rtn", "calibration": texts, "num_samples": SAMPLES, "max_length": LENGTH,
        "held_out": HELD_OUT, "sample_prompts": 6, "sample_tokens": 12,
    } | more  # fmt: skip
    return ["quantize", *(word for name, value in given.items() for word in (f"--{name}", str(value)))]


def run(words, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["qerl-pl"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    main(words)


def dense(folder: Path) -> dict[str, torch.Tensor]:
    """Numbers of a checkpoint, FP32, by the tests' own dequantization."""
    weights = Weights(folder)
    found = {n: weights[n].float() for n in weights if n.rpartition(".")[2] not in KEYS}
    packed = {n.rpartition(".")[0] for n in weights} - {n.rpartition(".")[0] for n in found if "weight" in n}
    for name in packed:
        if f"{name}.weight_packed" in weights:
            found[f"{name}.weight"] = dequantize_nvfp4({k: weights[f"{name}.{k}"] for k in KEYS})
    return found


def reference(folder: Path) -> torch.nn.Module:
    """Hugging Face's model in FP64 with the numbers of a checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float64, attn_implementation="eager")
    missing, unexpected = model.load_state_dict(dense(folder), strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    return model.eval()


def dense_base() -> dict[str, torch.Tensor]:
    weights = Weights(TINY)
    return {n: weights[n].float() for n in weights}


def drawn(texts: Path):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    wanted = {"held_out": (HELD_OUT, LENGTH), "calibration": (SAMPLES, LENGTH)}
    return draw(tokenizer, Source(str(texts), 0), wanted)[0]


def refused(words, capsys, monkeypatch) -> str:
    monkeypatch.delenv("QERL_PL_DEBUG", raising=False)
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        run(words, monkeypatch)
    assert caught.value.code == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("qerl-pl: error:")]
    assert len(said) == 1
    return said[0]
