"""What vLLM samples with on a GPU, as far as a CPU can tell. Twins: gpu/test_engine.py, gpu/test_kernels.py."""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qerl_pl.engine import vllm_adapter, vllm_kernels, vllm_nvfp4
from qerl_pl.engine.base import EngineSpec
from qerl_pl.engine.vllm import LARGEST_GRAPH, VLLMEngine, _graph_sizes
from registry.quantization import BF16, NVFP4, QuantFormat
from tests.test_marlin import interpreted

WIDTHS, RANK, INPUTS = (64, 32), 4, 48
MANY = 600  # tokens, as of prompts


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Kernels by Triton's interpreter, which has one stream."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from qerl_pl import decoding

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(vllm_adapter, "_side_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    yield from interpreted(decoding)


class Linear:
    """A layer and its ``quant_method``."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        self.weight = torch.randn(sum(widths), INPUTS) / INPUTS**0.5

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, bias)


def adapted(widths: tuple[int, ...], kernels: bool) -> tuple[Any, Linear]:
    torch.manual_seed(0)
    linear = Linear(widths)
    a, b = torch.randn(len(widths) * RANK, INPUTS), torch.randn(sum(widths), RANK)
    return vllm_adapter.AdapterMethod(linear, a, b, widths, kernels), linear


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 9, MANY])
def test_kernels_and_plain_products_agree(decoding: ModuleType, rows: int, few: bool) -> None:
    """With a kernel for few tokens too, which leaves shares of the sum; no number of tokens is left to PyTorch."""
    x, bias = torch.randn(rows, INPUTS), torch.randn(sum(WIDTHS))
    (fast, linear), (plain, _) = adapted(WIDTHS, True), adapted(WIDTHS, False)
    fast.add = None
    layer = SimpleNamespace()
    calls = []

    def few_tokens(x: Tensor, bias: Tensor, a: Tensor) -> tuple[Tensor, Tensor] | None:
        if len(x) > 8:
            return None
        calls.append(len(x))
        y, z = linear.apply(layer, x, bias), x @ a.T
        return torch.stack([0.25 * y, 0.75 * y]), z

    if few:
        layer.few_tokens = few_tokens
    want = x.double() @ linear.weight.double().T + bias.double()
    for part, low, high in zip(want.split(WIDTHS, 1), plain.a.split(RANK), plain.b.split(WIDTHS), strict=True):
        part += x.double() @ low.double().T @ high.double().T
    for method in (fast, plain):
        got = method.apply(layer, x, bias)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
    assert calls == [rows] * (few and rows <= 8)


def test_swiglu_adds_the_adapter_of_gate_and_up(decoding: ModuleType) -> None:
    method, linear = adapted((64, 64), True)
    activation = vllm_adapter.SwiGLU(method)
    layer = SimpleNamespace()

    # In FP32, of values of up to some hundred that cancel out here and there.
    def check(rows: int) -> None:
        x = torch.randn(rows, INPUTS)
        y = linear.apply(layer, x)
        method.add(y, x)
        want = torch.nn.functional.silu(y[:, :64]) * y[:, 64:]
        torch.testing.assert_close(activation(method.apply(layer, x)), want, rtol=1e-4, atol=1e-3)

    for rows in (3, MANY, 5):
        check(rows)
    method.apply(layer, torch.randn(3, INPUTS))  # interrupted here
    check(MANY)
    with pytest.raises(AssertionError, match="without the layer"):
        activation(torch.randn(3, 128))


def test_kernels_only_where_tiles_fit(decoding: ModuleType) -> None:
    assert adapted((64, 32), True)[0].kernels
    assert not adapted((64, 32), False)[0].kernels
    assert not adapted((24, 8), True)[0].kernels  # no tile of 16 lies in one part
    assert not adapted((16, 16, 16, 16), True)[0].kernels


def spec(quantization: QuantFormat, dtype: str = "bfloat16", device: str = "cuda") -> EngineSpec:
    return EngineSpec(Path("/nowhere"), quantization, 8, 16.0, ("q_proj",), dtype, device)


def test_choice_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left out is said."""
    monkeypatch.setattr(EngineSpec, "config", {})
    monkeypatch.setattr(vllm_nvfp4, "unusable", lambda config: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    every, ours = vllm_kernels.Kernels(True, True, backend="marlin"), vllm_kernels.Kernels(True, False)
    assert vllm_kernels.choose(spec(NVFP4()), True, False) == every
    assert vllm_kernels.choose(spec(BF16()), True, False) == ours
    assert vllm_kernels.choose(spec(NVFP4()), True, True) == ours  # dense
    assert vllm_kernels.choose(spec(NVFP4(), device="cpu"), True, False) == vllm_kernels.Kernels()
    for given, wanted, said in (
        (spec(NVFP4()), False, "as kernels: false asks for"),
        (spec(NVFP4(), "float32"), True, "as float32 arithmetic needs"),
    ):
        kernels = vllm_kernels.choose(given, wanted, False)
        assert not kernels.ours and not kernels.nvfp4 and kernels.backend == "marlin"
        assert kernels.note is not None and kernels.note.endswith(said)
    monkeypatch.setattr(vllm_nvfp4, "unusable", lambda config: "it is Tuesday")
    kernels = vllm_kernels.choose(spec(NVFP4()), True, False)
    assert (kernels.ours, kernels.nvfp4, kernels.backend) == (True, False, "marlin")
    assert kernels.note == "vLLM: NVFP4 by vLLM's own kernel: it is Tuesday"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert vllm_kernels.choose(spec(NVFP4()), True, False).backend == "auto"  # a GPU with FP4 units


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"num_key_value_heads": 3, "num_attention_heads": 9, "hidden_size": 576}, "v_proj have 576 . 192 . 192 out"),
        ({"intermediate_size": 96}, "gate_proj, up_proj have 96 "),
        ({"hidden_size": 160, "num_attention_heads": 5, "num_key_value_heads": 5}, "multiple of 128"),
    ],
)  # fmt: skip
def test_shapes_that_humming_cannot_compute(
    changes: dict[str, int], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2's among them: vLLM's Marlin pads those."""
    config = {
        "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 100,
    }  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    reason = vllm_nvfp4.unusable(config | changes)
    if why is None:  # then what is missing here is the library, or a GPU
        assert reason is not None and reason.startswith("humming-kernels 0.1.17 or later")
    else:
        assert reason is not None and re.search(why, reason)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    assert "compute capability 9.0 only, this one has 8.6" in str(vllm_nvfp4.unusable(config))


def test_buckets_cover_every_batch_that_is_not_dense() -> None:
    kernel = vllm_nvfp4.Nvfp4Kernel([1, 8, 64, 99, 142, 1000])
    made = {16: 16, 17: 32, 64: 64, 65: 112, 99: 112, 113: 128, 142: 144, 145: 256, 513: 1008, 1000: 1008, 1024: 1024}
    assert {rows: kernel.bucket(rows) for rows in made} == made  # graphs have kernels of their own, in whole tiles
    assert LARGEST_GRAPH <= vllm_nvfp4.DENSE_ROWS == vllm_nvfp4.BUCKETS[-1]  # no graph makes a weight dense
    for largest in (1, 8, 100, 1024, 4000):
        assert max(_graph_sizes(largest)) == min(largest, LARGEST_GRAPH)
    with pytest.raises(ValueError, match=r"engine.cudagraph_sizes: 1025 is above 1024"):
        VLLMEngine(cudagraph_sizes=[1, 1025])


class Attention:
    """As vLLM's: q, k and v are views of what the layer returns, and go to the attention after q and k are rotated."""

    def __init__(self, method: Any, layer: Any, rotary: Any) -> None:
        self.qkv_proj, self.layer, self.rotary_emb = SimpleNamespace(quant_method=method), layer, rotary

    def __call__(self, positions: Tensor, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        q, k, v = self.qkv_proj.quant_method.apply(self.layer, x).split(widths, -1)
        q, k = self.rotary_emb(positions, q, k)
        return torch.cat([q, k, v], -1)


@pytest.mark.parametrize("few", [False, True])
def test_rotary_adds_the_adapter_of_q_k_and_v(decoding: ModuleType, few: bool) -> None:
    """Against vLLM's own rotation after the plain products."""
    base = pytest.importorskip("vllm.model_executor.layers.rotary_embedding.base", reason="vllm is not installed")
    widths, head = (128, 64, 64), 32
    method, linear = adapted(widths, True)
    layer = SimpleNamespace()

    def few_tokens(x: Tensor, bias: None, a: Tensor) -> tuple[Tensor, Tensor] | None:
        y, z = linear.apply(layer, x), x @ a.T
        return (torch.stack([0.25 * y, 0.75 * y]), z) if len(x) <= 8 else None

    if few:
        layer.few_tokens = few_tokens
    plain = rotary_of(base, head)
    attention = type("Qwen2Attention", (Attention,), {})(method, layer, plain)
    vllm_adapter.place_after(attention)
    assert isinstance(attention.rotary_emb, vllm_adapter.Rotary)

    def want(positions: Tensor, x: Tensor) -> Tensor:
        y = linear.apply(layer, x)
        method.add(y, x)
        q, k, v = y.split(widths, -1)
        return torch.cat([*plain(positions, q, k), v], -1)

    for rows in (3, 40, MANY, 5):
        x, positions = torch.randn(rows, INPUTS), torch.randint(90, (rows,))
        got = attention(positions, x, widths)
        torch.testing.assert_close(got, want(positions, x), rtol=1e-5, atol=1e-4)


def rotary_of(base: ModuleType, head: int, **changes: Any) -> Any:
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        settings = {"rotary_dim": head, "is_neox_style": True} | changes
        return base.RotaryEmbedding(head, max_position_embeddings=90, base=10000.0, dtype=torch.float32, **settings)


def test_rotary_only_where_nothing_is_done_before_it(decoding: ModuleType) -> None:
    """Other models rotate otherwise, or norm q and k first: they are left to vLLM."""
    base = pytest.importorskip("vllm.model_executor.layers.rotary_embedding.base", reason="vllm is not installed")
    method = adapted((128, 64, 64), True)[0]

    def replaced(name: str, rotary: Any, **more: Any) -> bool:
        attention = type(name, (Attention,), more)(method, None, rotary)
        vllm_adapter.place_after(attention)
        return attention.rotary_emb is not rotary

    assert replaced("LlamaAttention", rotary_of(base, 32))
    assert not replaced("Qwen3Attention", rotary_of(base, 32))
    assert not replaced("Qwen2Attention", rotary_of(base, 32), qk_norm=True)
    assert not replaced("Qwen2Attention", rotary_of(base, 32, is_neox_style=False))
    assert not replaced("Qwen2Attention", rotary_of(base, 64, rotary_dim=32))
    assert not replaced("LlamaAttention", rotary_of(base, 96))  # no power of two
    assert not replaced("LlamaAttention", torch.nn.Identity())  # as Phi-3's, which is no RotaryEmbedding
    for name in ("forward_cuda", "forward_native"):
        rotary = rotary_of(base, 32)
        rotary.__class__ = type("Other", (base.RotaryEmbedding,), {name: lambda *a: None})
        assert not replaced("Qwen2Attention", rotary)
