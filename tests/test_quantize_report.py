"""The numbers of qerl-pl quantize against independent computations, and the card."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from qerl_pl.comparison import compare, read
from qerl_pl.engine.base import EngineSpec
from qerl_pl.engine.transformers import TransformersEngine
from qerl_pl.evaluation import Grades, Problem
from qerl_pl.evaluation import report as evaluation_report
from qerl_pl.quantize import card, quality, report
from qerl_pl.quantize.calibration import Source
from qerl_pl.quantize.quality import Checkpoint, Distribution, mean, sampling_entropy, unquantized, weight_errors
from qerl_pl.quantize.report import covers_more
from qerl_pl.seeds import derive_seed
from qerl_pl.types import Sampling
from registry.quantization import BF16, NVFP4
from tests.quantized import (
    HELD_OUT,
    LENGTH,
    PROJECTIONS,
    SAMPLES,
    TINY,
    arguments,
    dense,
    dense_base,
    drawn,
    reference,
    refused,
    run,
)
from tests.reference import dequantize_nvfp4, llama, write_checkpoint

pytest.importorskip("llmcompressor", reason="needs llm-compressor: pip install 'qerl-pl[quantize]'")


@pytest.mark.parametrize("algorithm", ["rtn", "awq"])
def test_the_report_is_what_an_independent_computation_gives(made, texts, algorithm):
    said = json.loads((made[algorithm] / "quality.json").read_text())["quality"]["held_out"]
    tokens = torch.tensor(drawn(texts)["held_out"].tokens)
    with torch.no_grad():
        p, q = (reference(f)(tokens).logits[:, :-1].log_softmax(-1) for f in (TINY, made[algorithm]))
    kl = (p.exp() * (p - q)).sum(-1).mean(-1)
    assert said["kl"]["value"] == pytest.approx(kl.mean().item(), rel=1e-4)
    assert said["kl_by_sequence"] == pytest.approx(kl.tolist(), rel=1e-3)
    half = 3.182446305284263 * kl.std().item() / math.sqrt(HELD_OUT)  # t for three degrees of freedom
    assert said["kl"]["high"] - said["kl"]["value"] == pytest.approx(half, rel=1e-3)
    for name, x in (("base", p), ("quantized", q)):
        nll = -x.gather(-1, tokens[:, 1:, None]).mean()
        assert said["perplexity"][name] == pytest.approx(math.exp(nll), rel=1e-5)
        assert said["entropy"][name] == pytest.approx(-(x.exp() * x).sum(-1).mean().item(), rel=1e-5)


def test_the_interval_of_kl_ends_at_zero(made, texts, tmp_path, monkeypatch):
    """By hand: 0.01 and 0.05 have the mean 0.03 and the standard error 0.02; t for one degree of freedom is 12.706."""
    cut = mean([0.01, 0.05], least=0.0)
    assert (cut.value, cut.low) == (pytest.approx(0.03), 0.0)
    assert cut.high == pytest.approx(0.03 + 0.02 * 12.706204736)
    assert mean([0.01, 0.05]).low == pytest.approx(0.03 - 0.02 * 12.706204736)
    narrow = mean([0.02, 0.0202], least=0.0)
    assert narrow.low == pytest.approx(0.0201 - 0.0001 * 12.706204736)
    below = mean([-2e-9, -4e-9], least=0.0)  # rounding
    assert below.low == below.value == pytest.approx(-3e-9)
    assert (mean([0.5], least=0.0).low, mean([0.5]).low, mean([0.5]).high) == (0.0, -math.inf, math.inf)
    shutil.copytree(made["rtn"], tmp_path / "there")
    found = Distribution([0.01, 0.05], ([1.0], [1.0]), ([1.0], [1.0]))
    monkeypatch.setattr(quality, "compare", lambda *_: found)
    run(arguments(texts, report=tmp_path / "there", sample_prompts=0), monkeypatch)
    assert json.loads((tmp_path / "there" / "quality.json").read_text())["quality"]["held_out"]["kl"]["low"] == 0.0


def test_entropy_of_own_samples(made):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    prompts = [tokenizer(text)["input_ids"] for text in ("Tom has 3 apples.", "Ann reads 12 pages a day")]
    found = sampling_entropy(Checkpoint(made["gptq"], NVFP4()), prompts, 7, 5, "cpu", torch.float32)
    engine = TransformersEngine()
    engine.start(EngineSpec(made["gptq"], NVFP4(), 1, 1.0, ("q_proj",)))
    groups = engine.generate(prompts, Sampling(max_tokens=7), [derive_seed("entropy", 5, i) for i in range(2)])
    model = reference(made["gptq"])
    for prompt, (completion,), value in zip(prompts, groups, found, strict=True):
        own = completion.token_ids
        logp = model(torch.tensor([[*prompt, *own]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)  # [own, V]
        assert value == pytest.approx(-(logp.exp() * logp).sum(-1).mean().item(), rel=1e-4)


def test_weight_errors_of_rounding(made):
    said = json.loads((made["rtn"] / "quality.json").read_text())["quality"]["weight_error"]
    ours, base = dense(made["rtn"]), dense_base()
    for kind in ("q_proj", "o_proj", "down_proj"):
        names = [f"{n}.weight" for n in PROJECTIONS if n.endswith(kind)]
        expected = [((ours[n] - base[n]).norm() / base[n].norm()).item() for n in names]
        assert said[kind]["by_layer"] == pytest.approx(expected, rel=1e-5)
        assert said[kind]["mean"] == pytest.approx(sum(expected) / 5, rel=1e-5)


def test_weight_errors_with_folded_scales(tmp_path):
    """A checkpoint whose channel scales are known is compared as if they were taken out again."""
    from safetensors.torch import load_file, save_file

    base = write_checkpoint(tmp_path / "base", llama(), BF16())
    shutil.copytree(tmp_path / "base", tmp_path / "folded")
    tensors = load_file(tmp_path / "folded" / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    expected, block = {}, "model.layers.0"

    def scale(size: int) -> torch.Tensor:
        return 2.0 ** torch.randint(-1, 2, (size,), generator=generator)  # powers of two: exact in BF16

    behind = {"input_layernorm": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
              "post_attention_layernorm": ["mlp.gate_proj", "mlp.up_proj"]}  # fmt: skip
    columns = {}
    for norm, modules in behind.items():
        s = scale(128)
        tensors[f"{block}.{norm}.weight"] /= s
        columns |= dict.fromkeys(modules, s)
    columns["mlp.down_proj"] = t = scale(192)
    rows = {"mlp.up_proj": t}
    for module, s in columns.items():
        tensors[f"{block}.{module}.weight"] *= s / rows.get(module, torch.ones(1)).unsqueeze(-1)
    groups = [list(v) for v in behind.values()] + [["mlp.down_proj"]]
    for group in groups:
        stored = NVFP4().quantize([tensors.pop(f"{block}.{m}.weight") for m in group])
        for module, part in zip(group, stored, strict=True):
            tensors |= {f"{block}.{module}.{key}": value.contiguous() for key, value in part.items()}
            seen = dequantize_nvfp4(part) / columns[module] * rows.get(module, torch.ones(1)).unsqueeze(-1)
            true = base[f"{block}.{module}.weight"]
            expected[module] = ((seen - true).norm() / true.norm()).item()
    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "folded" / "model.safetensors")
    found = weight_errors(unquantized(tmp_path / "base"), Checkpoint(tmp_path / "folded", NVFP4()))
    for module, error in expected.items():
        fitted = module in ("mlp.up_proj", "mlp.down_proj")
        assert found[module.rpartition(".")[2]][0] == pytest.approx(error, rel=0.03 if fitted else 1e-5), module
        assert found[module.rpartition(".")[2]][1] == pytest.approx(0, abs=1e-6)  # the other layer was not touched


def test_the_card_says_what_was_done(made, texts):
    both = json.loads((made["gptq"] / "quality.json").read_text())
    calibration, held = both["made"]["calibration"], both["made"]["held_out"]
    assert (calibration["sequences"], calibration["length"], calibration["tokens"]) == (SAMPLES, LENGTH, 1152)
    assert (held["sequences"], held["tokens"]) == (HELD_OUT, 384)
    # Counted again: whole texts in the shuffled order until each sequence is full.
    tokenizer, rows = AutoTokenizer.from_pretrained(TINY), [json.loads(line) for line in texts.open()]
    order, used = iter(Source(str(texts), 0).order), []
    for purpose in (HELD_OUT, SAMPLES):
        used.append(0)
        for _ in range(purpose):
            tokens = 0
            while tokens < LENGTH:
                row = rows[next(order)]
                chat = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["solution"]}]
                tokens += len(tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False))
                used[-1] += 1
    assert [held["texts"], calibration["texts"]] == used
    assert calibration["positions"] == [used[0], sum(used)]
    sizes = both["made"]["bytes"]
    assert sizes["after"] == sum(f.stat().st_size for f in made["gptq"].glob("*.safetensors"))
    assert sizes["before"] == (TINY / "model.safetensors").stat().st_size
    text = (made["gptq"] / "README.md").read_text()
    for words in (
        "base_model: tiny", "GPTQ (arXiv 2210.17323)", f"{used[1]} texts", "12 sequences × 96 = 1,152 tokens of ",
        "llmcompressor 0.14", "nvfp4-pack-quantized, 4-bit float groups of 16", "gptq: dampening_frac",
        "--num_samples 12",
        f"{both['quality']['held_out']['kl']['value']:.4f} (",
    ):  # fmt: skip
        assert words in text, words
    assert (made["gptq"] / "quality.md").read_text().startswith("# nvfp4 of tiny\n")
    assert (made["gptq"] / "quality.png").stat().st_size > 10_000


def test_a_report_on_a_checkpoint_that_is_there(made, texts, tmp_path, monkeypatch, capsys):
    shutil.copytree(made["awq"], tmp_path / "there")
    first = json.loads((tmp_path / "there" / "quality.json").read_text())
    run(arguments(texts, report=tmp_path / "there"), monkeypatch)
    again = json.loads((tmp_path / "there" / "quality.json").read_text())
    assert again == first
    (tmp_path / "there" / "quality.json").unlink()  # as of a checkpoint that others made
    run(arguments(texts, report=tmp_path / "there", held_out=20), monkeypatch)
    said = json.loads((tmp_path / "there" / "quality.json").read_text())["made"]
    assert said["algorithm"] == "not known" and "is not known" in said["held_out"]["why"]
    shutil.copy(made["awq"] / "quality.json", tmp_path / "there")
    alias = tmp_path / f"alias{texts.suffix}"
    alias.symlink_to(texts)
    for name in (texts, alias):  # a file has many names
        with pytest.raises(SystemExit):
            run(arguments(name, report=tmp_path / "there", held_out=5), monkeypatch)
        assert "--held_out 5 × 96 reaches into the texts" in capsys.readouterr().err


def test_accuracy_of_both_by_the_project_s_evaluation(made, texts, tmp_path, monkeypatch, capsys):
    """What ``qerl-pl test`` is asked for, and what becomes of its results; its own tests are in test_evaluation.py."""
    shutil.copytree(made["rtn"], tmp_path / "there")
    (tmp_path / "task.yaml").write_text("data: {eval_samples: 1}")
    started, asked, right = subprocess.run, [], {str(TINY): [1, 0, 0, 1], str(tmp_path / "there"): [1, 0, 0, 0]}

    def test(words, **how):
        if "qerl_pl" not in words:  # jsonargparse asks Python for its path when it first looks for stubs
            return started(words, **how)
        asked.append(dict(zip(words[4::2], words[5::2], strict=True)))
        problems = [Problem(str(i), [bool(r)], [None], [3], [True], True, {}) for i, r in enumerate(right[words[7]])]
        place = Path(asked[-1]["--trainer.logger.save_dir"]) / "version_0" / "results"
        place.mkdir(parents=True)
        (place / "test.json").write_text(
            json.dumps(evaluation_report("test", {"policy": "none"}, Grades({"": problems}), None))
        )
        return subprocess.CompletedProcess(words, 0, "")

    monkeypatch.setattr(subprocess, "run", test)
    words = arguments(texts, report=tmp_path / "there", task=tmp_path / "task.yaml", sample_prompts=0)
    run(words, monkeypatch)
    assert [a["--model.quantization"] for a in asked] == ["bf16", "nvfp4"]
    assert all((a["--config"], a["--adapter"]) == (str(tmp_path / "task.yaml"), "none") for a in asked)
    said = json.loads((tmp_path / "there" / "quality.json").read_text())["quality"]["tasks"]["test"]
    assert (said["a"]["value"], said["b"]["value"], said["difference"]["value"]) == (0.5, 0.25, -0.25)
    assert re.search(r"test, pass@1 +\| +50.0 % \| +25.0 % \| +-25.0", capsys.readouterr().out)
    compare(read(tmp_path / "there" / "task" / "base.json"), read(tmp_path / "there" / "task" / "quantized.json"))
    failed = subprocess.CompletedProcess([], 2, "a\nerror: no such file")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    assert "task.yaml: qerl-pl test failed: error: no such file" in refused(words, capsys, monkeypatch)


def numbers(tokens: int, prompts: int, longest: int, **tasks: int) -> dict:
    own = {"sampling_entropy": {"prompts": prompts, "max_tokens": longest}} if prompts else {}
    quality = own | ({"tasks": {name: {"problems": n} for name, n in tasks.items()}} if tasks else {})
    return {"made": {"held_out": {"tokens": tokens}}, "quality": quality or {"held_out": {}}}


@pytest.mark.parametrize(
    ("earlier", "later", "more"),
    [
        (numbers(384, 6, 12), numbers(384, 6, 12), []),
        (numbers(384, 6, 12), numbers(480, 8, 24, gsm8k=9), []),
        (numbers(1384, 0, 0), numbers(384, 6, 12), ["1,384 held-out tokens, not 384"]),
        (
            numbers(384, 6, 12),
            numbers(384, 0, 0),
            ["6 prompts to sample from, not 0", "12 tokens a sample, not 0"],
        ),
        (numbers(384, 6, 12, a=9, b=9), numbers(384, 6, 12, a=9), ["9 problems of the task b, not 0"]),
        (numbers(384, 6, 12, a=9), numbers(384, 6, 12, a=8), ["9 problems of the task a, not 8"]),
        ({"made": {}, "quality": None}, numbers(384, 6, 12), []),
        ({}, numbers(384, 6, 12), []),
    ],
)
def test_which_report_covers_more(earlier, later, more):
    assert covers_more(earlier, later) == more


def test_a_report_that_covers_more_is_kept(made, texts, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "there"
    shutil.copytree(made["rtn"], folder)
    (folder / "task").mkdir()
    (folder / "task" / "base.json").write_text("{}")
    first = {name: (folder / name).read_bytes() for name in ("quality.json", "quality.md", "quality.png")}
    for n in (1, 2):  # the second time there is nothing to lose
        run(arguments(texts, report=folder, sample_prompts=0), monkeypatch)
        said = "the earlier report is kept as .*quality-1.json: it has 6 prompts to sample from, not 0, 12 tokens"
        assert bool(re.search(said, capsys.readouterr().err)) == (n == 1)
    assert {name: (folder / name.replace(".", "-1.")).read_bytes() for name in first} == first
    assert [f.name for f in folder.glob("task*")] == ["task-1"]
    now = json.loads((folder / "quality.json").read_text())
    assert "sampling_entropy" not in now["quality"] and now["made"]["algorithm"] == "rtn"
    assert not (folder / "quality-2.json").exists()
    run(arguments(texts, report=folder, held_out=3, sample_prompts=0), monkeypatch)
    assert "quality-2.json: it has 384 held-out tokens, not 288" in capsys.readouterr().err
    assert json.loads((folder / "quality-2.json").read_text()) == now


def test_no_picture_of_other_numbers_stays(made, texts, tmp_path, monkeypatch, capsys):
    """Without matplotlib there is no new picture; the old one shows the numbers of before."""

    def missing(*_):
        raise ImportError("matplotlib is not installed")

    folder = tmp_path / "there"
    shutil.copytree(made["rtn"], folder)
    monkeypatch.setattr(card, "draw", missing)
    run(arguments(texts, report=folder, held_out=5), monkeypatch)  # covers more than the one before
    assert "no quality.png: matplotlib is not installed" in capsys.readouterr().err
    assert json.loads((folder / "quality.json").read_text())["made"]["held_out"]["sequences"] == 5
    assert not list(folder.glob("quality*.png"))


@pytest.mark.parametrize("late", [False, True])
def test_an_interrupted_report_leaves_the_one_before(late, made, texts, tmp_path, monkeypatch, capsys):
    """Whatever it was at: here at its picture, or at the moving of its files, when no more is promised."""

    def stop(*_):
        raise KeyboardInterrupt

    folder = tmp_path / "there"
    shutil.copytree(made["rtn"], folder)
    before = {f: f.read_bytes() for f in folder.iterdir()}
    monkeypatch.setattr(*((report, "keep") if late else (card, "draw")), stop)
    with pytest.raises(SystemExit):
        run(arguments(texts, report=folder, sample_prompts=0), monkeypatch)  # which the one before has more of
    assert {f: f.read_bytes() for f in folder.iterdir()} == before
    as_it_was, moved = f"stopped; {folder} is as it was", f"stopped while the report was moved into {folder}: "
    assert capsys.readouterr().err.splitlines()[-1].startswith(moved if late else as_it_was)
