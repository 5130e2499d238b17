"""Engine and policy put onto a device; with stand-ins for what only a GPU has. Twin: gpu/test_engine.py."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qerl_pl import build, gpu_memory
from qerl_pl.checkpoint import Weights
from qerl_pl.engine import VLLMEngine, vllm_shared
from qerl_pl.engine.base import CannotShareError
from qerl_pl.memory import CONTEXT
from qerl_pl.packed import DenseWeight, SharedLinear
from qerl_pl.policy import LoRA
from qerl_pl.types import Sampling
from registry.quantization import BF16, NF4, NVFP4, Int4, QuantFormat
from tests.reference import qwen2, write_checkpoint

CPU = torch.device("cpu")


class Engine:
    """Takes what it is started with; shares BF16 weights if it is told to."""

    plannable, max_num_seqs, max_num_batched_tokens, release_kv_cache = True, 8, 64, True
    notes = ("engine: of glass",)

    def __init__(self, shares: bool) -> None:
        self.shares = shares

    def base_in_memory(self, config: Any, quantization: QuantFormat, shared: bool) -> tuple[int, float]:
        return (1 if shared else 2), quantization.bits_per_weight

    def start(self, spec: Any) -> None:
        self.spec = spec

    def shared_weights(self) -> dict[str, Any]:
        if not self.shares:
            raise CannotShareError("it is made of glass")
        weights = Weights(self.spec.folder)
        names = [n.removesuffix(".weight") for n in weights if n.endswith("_proj.weight")]
        self.tensors = {n: weights[f"{n}.weight"] for n in names}
        return {n: DenseWeight(t) for n, t in self.tensors.items()}


def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: QuantFormat, shares: bool, **settings: Any) -> Any:
    """As on a GPU of 1 GB, with the arithmetic on the CPU."""
    write_checkpoint(tmp_path / "model", qwen2(), format_)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 2 * 10**9))
    monkeypatch.setattr(build, "EngineSpec", lambda *a, device, **k: SPEC(*a, device="cpu", **k))
    notes: list[str] = []
    data = SimpleNamespace(
        engine=Engine(shares), max_prompt_length=32, sampling=Sampling(4, 64),
        collector=SimpleNamespace(report=lambda phase, text: notes.append(text)),
    )  # fmt: skip
    defaults: dict[str, Any] = {
        "device": torch.device("cuda"), "dtype": "float32", "optimizer": torch.optim.AdamW,
        "gradient_checkpointing": "auto", "tokens_per_micro_batch": 128, "shared_base": True, "memory_gb": None,
        "trained_norms": (), "seed": 0,
    }  # fmt: skip
    policy = build.build_policy(data, str(tmp_path / "model"), format_, LoRA(rank=8), **(defaults | settings))
    return policy, data.engine, notes


SPEC = build.EngineSpec


def test_the_trainer_computes_from_the_engines_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, engine, notes = start(tmp_path, monkeypatch, BF16(), shares=True)
    layer = policy.peft.get_base_model().model.layers[1].mlp.up_proj.base_layer
    assert isinstance(layer, SharedLinear)
    assert layer.shared.tensor.data_ptr() == engine.tensors["model.layers.1.mlp.up_proj"].data_ptr()
    assert notes[0].startswith("memory plan, GB of 1.0")
    assert notes[1:] == ["engine: of glass", "base: one copy, the trainer computes from the engine's weights"]
    # 8 sequences in groups of 4: two prompts of two blocks, and five blocks (15 left of a prompt, 64 new) for each
    assert engine.spec.kv_cache_bytes == (2 * 2 + 8 * 5) * 16 * (2 * 2 * 2 * 32 * 2)
    assert policy.checkpointed_layers == 0


@pytest.mark.parametrize(
    ("settings", "reason"), [({}, "it is made of glass"), ({"shared_base": False}, "model.shared_base is false")]
)
def test_a_copy_of_its_own_is_said_aloud(
    settings: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, _, notes = start(tmp_path, monkeypatch, NVFP4(), shares="shared_base" in settings, **settings)
    assert notes[2] == f"base: the trainer holds a packed copy of its own ({reason})"
    assert not isinstance(policy.peft.get_base_model().model.layers[0].mlp.up_proj.base_layer, SharedLinear)


def test_layers_to_recompute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given, layers in ((True, build.ALL), (False, 0), (1, 1)):
        folder = tmp_path / str(given)
        folder.mkdir()
        assert start(folder, monkeypatch, BF16(), True, gradient_checkpointing=given)[0].checkpointed_layers == layers


def test_a_limit_holds_for_the_plan_and_the_allocator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2 * 10**9))
    notes = start(tmp_path, monkeypatch, BF16(), True, memory_gb=0.95)[2]
    assert notes[0].startswith("memory plan, GB of 0.9")
    assert shares == [(950_000_000 - CONTEXT) / 2e9]
    (tmp_path / "less").mkdir()
    with pytest.raises(ValueError, match=r"the update, with all layers but the last recomputed, needs 0\.90 GB"):
        start(tmp_path / "less", monkeypatch, BF16(), True, memory_gb=0.9)


def test_peaks_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 GB of cache count as allocated in the update, and are free."""
    peaks, limits = [9 * 10**9, 11 * 10**9], []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peaks.pop(0))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(gpu_memory, "limit_memory", limits.append)
    memory = gpu_memory.GPUMemory(10.0)
    with memory.update(torch.device("cuda"), lambda: 4 * 10**9):
        assert limits == [14 * 10**9]
    assert limits == [14 * 10**9, 10 * 10**9]
    assert {k: float(v) for k, v in memory.peaks.items()} == {
        "memory/rollout_gb": 9.0, "memory/update_gb": 7.0, "memory/peak_gb": 9.0
    }  # fmt: skip


def test_on_a_cpu_nothing_is_measured() -> None:
    memory, calls = gpu_memory.GPUMemory(), []
    with memory.update(CPU, lambda: calls.append(1) or 0):
        pass
    assert calls == [1] and memory.peaks == {}


def test_an_engine_on_the_cpu_shares_nothing_and_releases_nothing() -> None:
    engine = VLLMEngine()
    engine._cuda, engine._llm = False, object()
    with pytest.raises(CannotShareError, match="vLLM's CPU build repacks its weights"):
        engine.shared_weights()
    assert engine.release_cache() == 0


def sizes(hidden: int = 256, ffn: int = 512, heads: int = 4, kv_heads: int = 2) -> dict[str, Any]:
    """A ``config.json`` of a small decoder."""
    return {
        "num_hidden_layers": 2, "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": 512, "head_dim": 64,
    }  # fmt: skip


def test_what_a_vllm_engine_and_the_trainer_hold() -> None:
    """Copies, and bits of a weight in one of them."""
    packed, dense, model = VLLMEngine(), VLLMEngine(dense=True), sizes()
    assert packed.base_in_memory(model, NVFP4(), True) == (1, 4.5)
    assert packed.base_in_memory(model, NVFP4(), False) == (2, 4.5)
    assert packed.base_in_memory(model, BF16(), True) == (1, 16)
    assert packed.base_in_memory(model, Int4(), True) == (2, 4.125)  # the trainer does not read its kernels' layout
    assert dense.base_in_memory(model, Int4(), True) == (1, 16)
    assert dense.base_in_memory(model, NF4(), False) == (2, 10.25)


@pytest.mark.parametrize(
    ("model", "copies"),
    [
        (sizes(), 1),  # q, k and v: 512 outputs of 256 inputs
        (sizes(heads=3, kv_heads=1), 1),  # 5 · 64 of 2 · 128; o: 2 · 128 of 3 · 64
        (sizes(hidden=192, heads=3, kv_heads=1), 2),  # 5 · 64 of 3 · 64
        (sizes(ffn=544), 2),  # down: 256 of 544
    ],
)
def test_shapes_that_marlin_pads_take_two_copies(model: dict[str, Any], copies: int) -> None:
    assert VLLMEngine().base_in_memory(model, NVFP4(), True) == (copies, 4.5)
    assert VLLMEngine().base_in_memory(model, BF16(), True) == (1, 16)
    assert VLLMEngine(dense=True).base_in_memory(model, NVFP4(), True) == (1, 16)


@pytest.mark.parametrize("rows", range(32, 289, 32))
def test_marlin_pads_what_we_say_it_pads(rows: int) -> None:
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.marlin_utils")
    for columns in range(32, 289, 32):
        config = sizes(rows, columns) | {"head_dim": 128}
        ours = [(2 * columns, rows), (rows, columns), (1024, rows), (rows, 512)]
        assert vllm_shared.padded(config) == any(utils.marlin_padded_nk(*size, 16) != size for size in ours), columns
