"""Every format through vLLM's kernels on a GPU. Twins: test_vllm_engine.py, test_vllm_formats.py, test_formats.py."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from qerl_pl.checkpoint import prepare
from qerl_pl.engine import EngineSpec, VLLMEngine
from qerl_pl.engine.base import CannotShareError
from qerl_pl.policy import Policy, copy_adapter
from qerl_pl.random_model import SHAPES
from qerl_pl.types import Sampling
from registry.quantization import FORMATS
from tests.reference import TARGETS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")]
BITSANDBYTES = find_spec("vllm") is not None and find_spec("vllm.model_executor.model_loader.bitsandbytes_loader")
SIZE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
CASES = [*((name, False) for name in FORMATS), ("nf4", True), ("int4", True)]
PROMPTS = [[2 + (7 * i + 3 * j) % 97 for j in range(5 + i)] for i in range(4)]


@pytest.fixture
def shape(monkeypatch: pytest.MonkeyPatch) -> str:
    """Whole tiles of every kernel, in fused layers too."""
    monkeypatch.setitem(SHAPES, "gpu-test", SHAPES["tiny-test"] | SIZE)
    return "random:gpu-test"


@pytest.mark.parametrize(("name", "dense"), CASES, ids=[f"{n}-{'dense' if d else 'packed'}" for n, d in CASES])
def test_the_engine_samples_from_the_trainers_numbers(name: str, dense: bool, shape: str, tmp_path: Path) -> None:
    """Mean |Δ log p| below 0.05 nats: both compute in BF16, on random weights. Without the adapter it is much more."""
    quantization = FORMATS[name]()
    spec = EngineSpec(
        prepare(shape, quantization, tmp_path), quantization, 8, 16.0, TARGETS, "bfloat16", "cuda", max_length=64
    )
    engine = VLLMEngine(
        max_num_seqs=16, kv_cache_gb=0.25, enforce_eager=name != "nf4", cudagraph_sizes=[16], dense=dense
    )
    if name == "nf4" and not dense and not BITSANDBYTES:
        with pytest.raises(ValueError, match=r"no longer has; set engine\.dense: true"):
            engine.start(spec)
        return
    engine.start(spec)
    try:
        policy = Policy(spec)
        generator = torch.Generator().manual_seed(0)
        trained = policy.adapter_parameters()
        adapter = {n: 0.3 * torch.randn(p.shape, generator=generator) for n, p in sorted(trained.items())}
        copy_adapter(trained, adapter)
        engine.load_adapter(adapter)
        engine.refresh()
        groups = engine.generate(PROMPTS, Sampling(n=4, max_tokens=24), range(4))
        pairs = [(prompt, c) for prompt, group in zip(PROMPTS, groups, strict=True) for c in group]

        def difference(with_adapter: bool) -> float:
            parts = []
            for prompt, completion in pairs:
                tokens = torch.tensor([prompt + completion.token_ids], device="cuda")
                mask = torch.arange(tokens.shape[1], device="cuda")[None] >= len(prompt)
                lengths = torch.tensor([tokens.shape[1]], device="cuda")
                with torch.no_grad():
                    logprobs, _ = policy(tokens, lengths, mask, adapter=with_adapter)
                parts.append((logprobs[mask].cpu() - torch.tensor(completion.logprobs)).abs())
            return torch.cat(parts).mean().item()

        found = difference(True)
        print(f"{name} dense={dense}: mean |Δ log p| {found:.4f}, without the adapter {difference(False):.4f}")
        assert found < 0.05 and difference(False) > 5 * found
        _check_sharing(engine, spec, shares=dense or name in ("nvfp4", "bf16"))
    finally:
        engine.close()


def _check_sharing(engine: VLLMEngine, spec: EngineSpec, shares: bool) -> None:
    """As the memory plan has it; what is shared is the trainer's own weight."""
    assert engine.base_in_memory(spec.config, spec.quantization, True)[0] == (1 if shares else 2)
    if not shares:
        with pytest.raises(CannotShareError, match="vLLM holds"):
            engine.shared_weights()
        return
    shared = engine.shared_weights()
    module = Policy(spec).peft.get_base_model().model.layers[1].mlp.down_proj.base_layer
    weight = shared["model.layers.1.mlp.down_proj"]
    own = module.dense(torch.bfloat16).float()
    torch.testing.assert_close(weight.dense(torch.bfloat16).float() * weight.scale, own, rtol=2**-8, atol=0)


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_gpu_quantizes_and_dequantizes_as_the_cpu(name: str) -> None:
    weight = (0.1 * torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))).bfloat16()
    (there,), (here,) = FORMATS[name]().quantize([weight.cuda()]), FORMATS[name]().quantize([weight])
    for key, tensor in here.items():
        assert torch.equal(there[key].cpu().view(torch.uint8), tensor.view(torch.uint8)), key
    for dtype in (torch.float32, torch.bfloat16):
        on_gpu = FORMATS[name]().dequantize({k: t.cuda() for k, t in here.items()}, dtype)
        assert torch.equal(on_gpu.cpu(), FORMATS[name]().dequantize(here, dtype))
