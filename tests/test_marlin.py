"""Marlin's layout read back, with Triton's interpreter instead of a GPU. Twin: gpu/test_engine.py."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from qerl_pl import marlin, policy
from qerl_pl.engine.base import EngineSpec
from registry.quantization import NVFP4, nvfp4_triton
from tests.reference import (
    ALPHA,
    FUSED,
    RANK,
    TARGETS,
    Reference,
    dequantize_nvfp4,
    qwen2,
    random_adapter,
    write_checkpoint,
)  # fmt: skip

triton = pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture
def kernels() -> Iterator[ModuleType]:
    yield from interpreted(marlin)


def interpreted(module: ModuleType) -> Iterator[ModuleType]:
    """The module with its kernels run by Triton's interpreter on the CPU."""
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        yield importlib.reload(module)
    importlib.reload(module)


def pack(stored: list[dict[str, Tensor]], layout: str = "marlin") -> tuple[Tensor, Tensor, float]:
    """An engine's tensors of weights [out, in] that are one layer, number by number by the layout's description."""
    codes = torch.cat([s["weight_packed"] for s in stored])
    codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1).T.tolist()  # [in][out]
    scale = torch.cat([s["weight_scale"] for s in stored]).float().T  # [in / 16, out]
    tiles, outputs = scale.shape
    packed, scales = torch.zeros(tiles, 2 * outputs, dtype=torch.int64), torch.zeros(tiles, outputs, dtype=torch.uint8)
    # E4M3 times 2^7 as FP16; the sign bit is left out and the seven lowest bits are 0, so one byte holds it.
    byte = ((scale * 128).half().view(torch.int16) >> 7).to(torch.uint8)
    if layout == "humming":  # the checkpoint's own bytes
        byte = scale.to(torch.float8_e4m3fn).view(torch.uint8)
    for tile in range(tiles):
        for block in range(outputs // 64):
            for word in range(128):
                i, q, j = word // 16, word // 4 % 4, word % 4
                for place in range(8):
                    a, b, c = place // 4, place // 2 % 2, place % 2
                    k, n = 8 * c + 2 * q + a, 64 * block + 16 * j + 8 * b + i
                    packed[tile, 128 * block + word] |= codes[16 * tile + k][n] << (4 * place)
            for n in range(64):
                u, v, b, i = n // 32, n // 16 % 2, n // 8 % 2, n % 8
                place = 8 * i + 4 * u + (2 * b + v if layout == "marlin" else 2 * v + b)
                scales[tile, 64 * block + place] = byte[tile, 64 * block + n]
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).int()
    divisor = float(stored[0]["weight_global_scale"])
    return packed, scales.view(torch.float8_e4m3fn), (2.0**119 if layout == "marlin" else 1.0) / divisor


@pytest.mark.parametrize("layout", ["marlin", "humming"])
def test_dense_is_the_dequantized_weight(kernels: ModuleType, layout: str) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(n, 48) * 0.05 for n in (128, 64, 64)]
    weights[0][:8] *= 2e-4  # scales below the normal numbers of E4M3
    stored = NVFP4().quantize(weights)
    packed, scales, global_scale = pack(stored, layout)
    first, scale = 0, kernels.TiledWeight.global_scale(global_scale, layout)
    for part, width in zip(stored, (128, 64, 64), strict=True):
        weight = kernels.TiledWeight(packed, scales, scale, first, width, layout)
        assert weight.shape == (width, 48)
        for dtype in (torch.float32, torch.bfloat16):
            dense = weight.dense(dtype)
            assert dense.dtype == dtype
            torch.testing.assert_close(dense.float() * weight.scale, dequantize_nvfp4(part), rtol=2e-7, atol=0)
        first += width


def test_layout_is_vllms(kernels: ModuleType) -> None:
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils", reason="vllm is not installed")
    marlin_utils, fp4, testing = (
        importlib.import_module(f"{utils.__name__}.{n}")
        for n in ("marlin_utils", "marlin_utils_fp4", "marlin_utils_test")
    )
    stored = NVFP4().quantize([torch.randn(128, 64)])
    codes = torch.stack([stored[0]["weight_packed"] & 15, stored[0]["weight_packed"] >> 4], -1).flatten(1).T
    theirs = testing.marlin_weights(codes.int().contiguous(), 64, 128, 4, testing.get_weight_perm(4))
    permuted = marlin_utils.marlin_permute_scales(stored[0]["weight_scale"].T.contiguous().half(), 64, 128, 16)
    their_scales, factor = fp4.nvfp4_marlin_process_scales(permuted, a_dtype=torch.bfloat16)
    packed, scales, global_scale = pack(stored)
    assert torch.equal(packed, theirs)
    assert factor == 1
    assert torch.equal(scales.view(torch.uint8), their_scales.view(torch.uint8))
    inverse = (1 / stored[0]["weight_global_scale"]).bfloat16().float()
    assert global_scale == pytest.approx(
        float(fp4.nvfp4_marlin_process_global_scale(inverse, torch.bfloat16)), rel=0.01
    )


def test_checkpoint_layout() -> None:
    for kernel in interpreted(nvfp4_triton):
        for rows, columns in ((3, 16), (40, 96)):
            weight = torch.randn(rows, columns)
            weight[0] *= 1e-4
            stored = NVFP4().quantize([weight])[0]
            dense = kernel.dequantize(*stored.values(), torch.float32)
            assert torch.equal(dense, dequantize_nvfp4(stored))


def test_parts_end_where_tiles_do() -> None:
    packed, scales = torch.zeros(4, 256, dtype=torch.int32), torch.zeros(4, 128)
    with pytest.raises(ValueError, match="outputs 0 to 32 of 128: they must begin and end at multiples of 64"):
        marlin.TiledWeight(packed, scales, 1.0, 0, 32)
    with pytest.raises(ValueError, match=r"scales are \[2, 128\], expected \[4, 128\]"):
        marlin.TiledWeight(packed, scales[:2], 1.0, 0, 64)


def test_policy_on_an_engines_weights(kernels: ModuleType, tmp_path: Path) -> None:
    """Log-probabilities and gradients are Hugging Face's and PEFT's; no projection is read from the checkpoint."""
    config = qwen2()
    dense = write_checkpoint(tmp_path / "model", config, NVFP4())
    from qerl_pl.checkpoint import Weights

    weights, shared = Weights(tmp_path / "model"), {}
    for layer in range(config.num_hidden_layers):
        for group in FUSED:
            block = "self_attn" if group[0] in ("q_proj", "o_proj") else "mlp"
            names = [f"model.layers.{layer}.{block}.{member}" for member in group]
            keys = ("weight_packed", "weight_scale", "weight_global_scale")
            stored = [{key: weights[f"{name}.{key}"] for key in keys} for name in names]
            packed, scales, global_scale = pack(stored)
            first = 0
            for name, part in zip(names, stored, strict=True):
                scale, width = kernels.TiledWeight.global_scale(global_scale), part["weight_scale"].shape[0]
                shared[name] = kernels.TiledWeight(packed, scales, scale, first, width)
                first += width
    embeddings = weights["model.embed_tokens.weight"].float()
    shared |= {"model.embed_tokens": embeddings}
    ours = policy.Policy(EngineSpec(tmp_path / "model", NVFP4(), RANK, ALPHA, TARGETS), shared)
    assert ours.peft.get_base_model().lm_head.weight.data_ptr() == embeddings.data_ptr()
    reference = Reference(config, dense)
    adapter = random_adapter(reference, 0)
    policy.copy_adapter(ours.adapter_parameters(), adapter)
    reference.set_adapter(adapter)
    tokens = torch.randint(2, 100, (1, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(9)[None] > 3
    logprobs, _ = ours(tokens, torch.tensor([9]), mask)
    want = reference.peft(tokens).logits[0, 3:-1].log_softmax(-1).gather(-1, tokens[0, 4:, None])[:, 0]
    torch.testing.assert_close(logprobs[mask], want, atol=3e-5, rtol=0)
    names = list(ours.adapter_parameters())
    got = torch.autograd.grad(logprobs.sum(), [ours.adapter_parameters()[n] for n in names])
    expected = torch.autograd.grad(want.sum(), [reference.lora[n] for n in names])
    for name, a, b in zip(names, got, expected, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm(), name
