"""vLLM on a GPU: its tensors under the trainer, its numbers, its memory. Twins: test_vllm_engine.py, test_policy.py."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from qerl_pl.checkpoint import Weights, stored_projection
from qerl_pl.engine.base import CannotShareError, EngineSpec
from qerl_pl.engine.vllm import VLLMEngine
from qerl_pl.engine.vllm_adapter import Rotary
from qerl_pl.packed import SharedLinear
from qerl_pl.policy import Policy, copy_adapter
from qerl_pl.types import Completion, Sampling
from registry.quantization import BF16, NVFP4, QuantFormat
from tests.reference import ALPHA, MAX_LEN, RANK, TARGETS, Reference, random_adapter, small, write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
]
PROMPTS = [[2 + (7 * i + 3 * j) % 97 for j in range(5 + i)] for i in range(4)]
SAMPLING = Sampling(n=4, max_tokens=24)
BF16_ULP = 2.0**-8
ODD = 192  # hidden size: q, k and v together are no multiple of 128


@dataclass
class Case:
    engine: VLLMEngine
    reference: Reference
    spec: EngineSpec

    def sample(self, sampling: Sampling = SAMPLING) -> list[list[Completion]]:
        return self.engine.generate(PROMPTS, sampling, range(4))

    def write(self, adapter: dict[str, torch.Tensor]) -> None:
        self.engine.load_adapter(adapter)
        self.engine.refresh()
        self.reference.set_adapter(adapter)

    def difference(self, groups: list[list[Completion]]) -> float:
        """Mean |Δ log p| against Hugging Face and PEFT in FP32."""
        pairs = [(c, p) for p, group in zip(PROMPTS, groups, strict=True) for c in group]
        parts = [(torch.tensor(c.logprobs) - self.reference.logprobs(p, c.token_ids)).abs() for c, p in pairs]
        return torch.cat(parts).mean().item()


@pytest.fixture(
    scope="module",
    params=[(BF16(), True, 256), (NVFP4(), True, 256), (NVFP4(), False, 256), (NVFP4(), True, ODD)],
    ids=["bf16", "nvfp4", "nvfp4-without-kernels", "nvfp4-of-odd-shapes"],
)
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    quantization: QuantFormat = request.param[0]
    folder = tmp_path_factory.mktemp("cuda") / "model"
    hidden = request.param[2]
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_attention_heads": hidden // 32}
    config = Qwen2Config(**(small() | sizes), tie_word_embeddings=True)
    reference = Reference(config, write_checkpoint(folder, config, quantization))
    engine = VLLMEngine(max_model_len=MAX_LEN, max_num_seqs=32, kv_cache_gb=0.5, kernels=request.param[1])
    spec = EngineSpec(folder, quantization, RANK, ALPHA, TARGETS, dtype="bfloat16", device="cuda")
    engine.start(spec)
    yield Case(engine, reference, spec)
    engine.close()


def test_adapter_and_noise_through_cuda_graphs(case: Case) -> None:
    """Nearer to the reference that has them than to the one that has not."""
    case.write({name: torch.zeros_like(t) for name, t in case.reference.lora.items()})
    assert case.difference(case.sample()) < 0.1
    adapter = random_adapter(case.reference, 1)
    case.engine.load_adapter(adapter)
    case.engine.refresh()
    with_adapter = case.sample()
    without = case.difference(with_adapter)
    case.reference.set_adapter(adapter)
    assert case.difference(with_adapter) < min(0.1, without / 4)
    for siblings in (1, 2, 10):  # batches of 4, 8 and 40: other kernels than for 16
        assert case.difference(case.sample(Sampling(siblings, 24))) < min(0.1, without / 4)
    for name, tensor in case.engine.adapter().items():
        torch.testing.assert_close(tensor.cpu(), adapter[name], rtol=BF16_ULP, atol=0)

    clean = {name: w.clone() for name, w in case.engine.norms().items()}
    for name, w in case.engine.norms().items():
        w.mul_(1.2)
        case.reference.norms[name].data.mul_(1.2)
    case.engine.refresh()
    assert case.difference(case.sample()) < 0.1
    for name, w in case.engine.norms().items():
        w.copy_(clean[name])
        case.reference.norms[name].data.copy_(clean[name])
    case.engine.refresh()
    assert [c.token_ids for g in case.sample() for c in g] == [c.token_ids for g in with_adapter for c in g]


def test_the_engines_weights_are_the_checkpoints(case: Case) -> None:
    """Read by our kernel, and by multiplying the identity with vLLM's own."""
    if case.spec.config["hidden_size"] == ODD:
        with pytest.raises(CannotShareError, match="not in Marlin's NVFP4 layout"):  # it pads them
            case.engine.shared_weights()
        assert case.engine.base_in_memory(case.spec.config, NVFP4(), True) == (2, 4.5)
        return
    shared, weights = case.engine.shared_weights(), Weights(case.spec.folder)
    projections = [n for n in shared if n.rpartition(".")[2] in TARGETS]
    assert len(projections) == 2 * 7
    for name in projections:
        format_, stored = stored_projection(weights, name, case.spec.quantization)
        want = format_.dequantize(stored, torch.float32)
        got = shared[name].dense(torch.float32).cpu() * shared[name].scale
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
        bfloat16 = shared[name].dense(torch.bfloat16).float().cpu() * shared[name].scale
        torch.testing.assert_close(bfloat16, want, rtol=1e-6, atol=0)  # FP4 · FP8 is exact in BF16
    assert torch.equal(shared["model.embed_tokens"].cpu(), weights["model.embed_tokens.weight"])

    from qerl_pl.engine import vllm_compat

    layer = dict(vllm_compat.model(case.engine._llm).named_modules())["model.layers.1.mlp.down_proj"]
    through = layer.quant_method.method.apply  # without the adapter
    ours = shared["model.layers.1.mlp.down_proj"]
    want = ours.dense(torch.float32).clone() * ours.scale
    for copies in (1, 3):  # few tokens, and so many that the weight is made dense
        size = want.shape[1]
        identity = torch.eye(size, dtype=torch.bfloat16, device="cuda").repeat(copies, 1)
        torch.testing.assert_close(through(layer, identity)[-size:].float().T, want, rtol=2**-7, atol=0)


def test_the_kernels_in_use(case: Case) -> None:
    """On a Hopper GPU with Humming, which the lock file has; what is left out is said."""
    from qerl_pl.engine import vllm_compat, vllm_kernels

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("NVFP4 by kernels of ours was tried on Hopper only")

    # Without kernels all blocks have one rotation.
    modules = dict(vllm_compat.model(case.engine._llm).named_modules(remove_duplicate=False))
    module, rotary = modules["model.layers.1.mlp.down_proj"], modules["model.layers.1.self_attn.rotary_emb"]
    kernels = vllm_kernels.choose(case.spec, case.engine.kernels, dense=False)
    assert hasattr(module, "humming") == kernels.nvfp4
    assert isinstance(rotary, Rotary) == kernels.ours
    assert case.engine.notes == (() if kernels.note is None else (kernels.note,))
    quantized = isinstance(case.spec.quantization, NVFP4)
    assert kernels.nvfp4 == (quantized and case.engine.kernels and case.spec.config["hidden_size"] == 256)


def test_a_policy_on_the_engines_weights_is_the_policy(case: Case) -> None:
    if case.spec.config["hidden_size"] == ODD:
        pytest.skip("the policy has weights of its own")
    shared, precise = case.engine.shared_weights(), replace(case.spec, dtype="float32")
    projections = {name: weight for name, weight in shared.items() if not isinstance(weight, torch.Tensor)}
    adapter = random_adapter(case.reference, 2)
    case.write(adapter)
    groups = case.sample()
    rows = [(p + c.token_ids, len(p)) for p, group in zip(PROMPTS, groups, strict=True) for c in group]
    lengths = torch.tensor([len(tokens) for tokens, _ in rows], device="cuda")
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long, device="cuda")
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for row, (ids, start) in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids, device="cuda")
        mask[row, start : len(ids)] = True

    def run(policy: Policy) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        copy_adapter(policy.adapter_parameters(), adapter)
        logprobs, _ = policy(tokens, lengths, mask)
        grads = torch.autograd.grad(logprobs.sum(), list(policy.adapter_parameters().values()))
        return logprobs.detach(), grads

    on_shared = Policy(precise, projections)
    assert isinstance(on_shared.peft.get_base_model().model.layers[0].mlp.up_proj.base_layer, SharedLinear)
    (ours, our_grads), (own, own_grads) = run(on_shared), run(Policy(precise))
    torch.testing.assert_close(ours, own, atol=1e-4, rtol=0)
    for a, b in zip(our_grads, own_grads, strict=True):
        assert (a - b).norm() < 1e-4 * b.norm()

    everything = Policy(case.spec, shared, checkpointed_layers=1)
    embedding = everything.peft.get_base_model().lm_head.weight
    torch.nn.ModuleList([everything]).cpu()  # as Lightning does after a stage
    assert embedding.data_ptr() == shared["model.embed_tokens"].data_ptr()
    fast, fast_grads = run(everything)
    sampled = torch.cat([torch.tensor(c.logprobs) for group in groups for c in group])
    assert (ours[mask].cpu() - sampled).abs().mean() < 0.1  # BF16 on a random model
    assert (fast - ours)[mask].abs().mean() < 0.1
    for a, b in zip(fast_grads, own_grads, strict=True):
        assert (a - b).norm() < 0.3 * b.norm()  # the two lines above are the proof; this is BF16 in all that it does


def test_released_cache(case: Case) -> None:
    """Its memory is free while it is released, and the tokens after it are those from before."""
    before = [c.token_ids for group in case.sample() for c in group]
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    case.engine.release_cache()
    case.engine.release_cache()  # twice is once
    assert torch.cuda.mem_get_info()[0] - free > 0.45 * 2**30
    poison = torch.full((2**28,), float("nan"), device="cuda")  # memory that the cache may get back
    del poison
    torch.cuda.empty_cache()
    assert [c.token_ids for group in case.sample() for c in group] == before
