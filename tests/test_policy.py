"""The policy against Hugging Face + PEFT over dequantized weights: values, gradients, what is saved and stored."""

from pathlib import Path

import pytest
import torch

from qerl_pl.engine.base import EngineSpec
from qerl_pl.packed import PackedLinear
from qerl_pl.policy import LoRA, Policy, copy_adapter
from registry.quantization import BF16, NVFP4
from tests.reference import ALPHA, RANK, TARGETS, Reference, llama, qwen2, random_adapter, write_checkpoint

TOKENS = torch.tensor([[5, 9, 31, 7, 60, 2, 44, 3], [8, 8, 90, 12, 1, 0, 0, 0]])
LENGTHS = torch.tensor([8, 5])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 0, 0]], dtype=torch.bool)


@pytest.fixture(
    scope="module",
    params=[(qwen2, NVFP4()), (llama, NVFP4()), (qwen2, BF16())],
    ids=["qwen2-nvfp4", "llama-nvfp4", "qwen2-bf16"],
)
def case(request, tmp_path_factory):
    make, format_ = request.param
    folder = tmp_path_factory.mktemp("policy") / "model"
    dense = write_checkpoint(folder, make(), format_)
    reference = Reference(make(), dense)
    adapter = random_adapter(reference, 1)
    reference.set_adapter(adapter)
    policy = Policy(EngineSpec(folder, format_, RANK, ALPHA, TARGETS))
    copy_adapter(policy.adapter_parameters(), adapter)
    return policy, reference, folder, format_


def expected(reference):  # [2, 8] by one dense softmax a row
    rows = []
    for row in range(2):
        logits = reference.peft(TOKENS[row : row + 1, : LENGTHS[row]]).logits[0]
        logprobs = logits.log_softmax(-1)[:-1].gather(-1, TOKENS[row, 1 : LENGTHS[row], None])[:, 0]
        rows.append(torch.nn.functional.pad(logprobs, (1, 8 - int(LENGTHS[row]))))
    return torch.stack(rows) * MASK


def test_logprobs_and_every_gradient(case):
    policy, reference, *_ = case
    weight = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    ours, _ = policy(TOKENS, LENGTHS, MASK)
    theirs = expected(reference)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    names = list(policy.adapter_parameters())
    got = torch.autograd.grad((ours * weight).sum(), [policy.adapter_parameters()[n] for n in names])
    want = torch.autograd.grad((theirs * weight).sum(), [reference.lora[n] for n in names])
    for name, a, b in zip(names, got, want, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm(), name
        assert b.norm() > 0, name


def test_gradient_checkpointing_changes_nothing(case):
    policy, _, folder, format_ = case
    other = Policy(EngineSpec(folder, format_, RANK, ALPHA, TARGETS), checkpointed_layers=1)
    copy_adapter(other.adapter_parameters(), policy.adapter_parameters())
    name = "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"
    calls = []
    other.peft.get_base_model().model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    grads = [
        torch.autograd.grad(p(TOKENS, LENGTHS, MASK)[0].sum(), p.adapter_parameters()[name])[0] for p in (policy, other)
    ]
    torch.testing.assert_close(grads[0], grads[1])
    assert len(calls) == 2  # forward, and once more in backward
    other.peft.get_base_model().model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(2))
    other(TOKENS, LENGTHS, MASK)[0].sum().backward()
    assert calls.count(2) == 1


def test_a_block_is_not_computed_to_its_end_again(case, monkeypatch):
    _, _, folder, format_ = case
    policy, counts = Policy(EngineSpec(folder, format_, RANK, ALPHA, TARGETS), checkpointed_layers=2), {}
    for name, module in policy.peft.get_base_model().named_modules():
        if isinstance(module, PackedLinear):
            kind = name.removesuffix(".base_layer").rpartition(".")[2]

            def dense(dtype, module=module, kind=kind):
                counts[kind] = counts.get(kind, 0) + 1
                return PackedLinear.dense(module, dtype)

            monkeypatch.setattr(module, "dense", dense)
    policy(TOKENS, LENGTHS, MASK)[0].sum().backward()
    # Two layers: forward, again, backward; the first layer's q, k and v have no gradient to hand on.
    assert counts == {"q_proj": 5, "k_proj": 5, "v_proj": 5, "o_proj": 6, "gate_proj": 6, "up_proj": 6, "down_proj": 4}


def test_without_adapter_it_is_the_base(case):
    policy, reference, *_ = case
    with reference.peft.disable_adapter(), torch.no_grad():
        base = expected(reference)
    torch.testing.assert_close(policy(TOKENS, LENGTHS, MASK, adapter=False)[0], base, atol=2e-5, rtol=0)
    assert (base - expected(reference)).abs().max() > 0.01


def test_temperature(case):
    policy, reference, *_ = case
    logits = reference.peft(TOKENS[:1]).logits[0] / 0.5
    logprobs, entropy = policy(TOKENS, LENGTHS, MASK, temperature=0.5)
    dense = logits.log_softmax(-1)
    torch.testing.assert_close(logprobs[0, 3], dense[2, TOKENS[0, 3]], atol=5e-5, rtol=0)
    torch.testing.assert_close(entropy[0, 3], -(dense[2].exp() * dense[2]).sum(), atol=1e-4, rtol=0)


def test_padding_and_batch_do_not_matter(case):
    policy, *_ = case
    both, _ = policy(TOKENS, LENGTHS, MASK)
    alone, _ = policy(TOKENS[1:, :5], LENGTHS[1:], MASK[1:, :5])
    torch.testing.assert_close(both[1:, :5], alone, atol=2e-5, rtol=0)


def test_only_the_adapter_is_trainable(case):
    policy, *_ = case
    trainable = {id(p) for p in policy.parameters() if p.requires_grad}
    assert trainable == {id(p) for p in policy.adapter_parameters().values()}
    assert len(trainable) == 2 * 7 * 2  # A and B of seven projections in two layers


def test_it_stays_where_it_was_built(case):
    """Lightning moves modules between two stages; the engine's tensors would come back as copies."""
    torch.nn.ModuleList([case[0]]).to("meta")
    assert not any(tensor.is_meta for tensor in [*case[0].parameters(), *case[0].buffers()])
    with pytest.raises(TypeError, match=r"cannot become torch.float64: its adapter is FP32; set model\.dtype"):
        case[0].double()


def test_saved_folder_loads_in_peft(case, tmp_path: Path):
    from peft import PeftModel

    policy, reference, *_ = case
    policy.save_adapter(tmp_path, "base")
    with torch.no_grad():
        before = reference.peft(TOKENS).logits
        loaded = PeftModel.from_pretrained(reference.peft.unload(), tmp_path)
        after = loaded(TOKENS).logits
    torch.testing.assert_close(after, before)
    assert not list(tmp_path.glob("*.bin"))


def test_adapters_that_do_not_fit(case):
    policy, *_ = case
    tensors = dict(policy.adapter_parameters())
    name = next(iter(tensors))
    with pytest.raises(ValueError, match="on one side only"):
        copy_adapter(policy.adapter_parameters(), {n: t for n, t in tensors.items() if n != name})
    with pytest.raises(ValueError, match="is the rank the same"):
        copy_adapter(policy.adapter_parameters(), tensors | {name: torch.zeros(3, 3)})


def test_lora_settings():
    with pytest.raises(ValueError, match=r"lora.targets: qkv_proj; choose from q_proj"):
        LoRA(targets=("qkv_proj",))
    with pytest.raises(ValueError, match="rank 0 must be at least 1"):
        LoRA(rank=0)


def test_rank_stabilized_scale_and_what_is_refused():
    assert LoRA(rank=16, alpha=8).effective_alpha == 8
    assert LoRA(rank=16, alpha=8, rank_stabilized=True).effective_alpha / 16 == pytest.approx(8 / 4)
    with pytest.raises(ValueError, match=r"lora\.dora: vLLM serves no DoRA adapter"):
        LoRA(dora=True)
    with pytest.raises(ValueError, match=r"lora\.b_rate_ratio: 0 must be above 0"):
        LoRA(b_rate_ratio=0)


def test_a_rate_of_its_own_for_b(case):
    from qerl_pl.module import QeRLModule, adamw

    policy, *_ = case
    module = QeRLModule(lora=LoRA(b_rate_ratio=16.0), optimizer=lambda groups: adamw(groups, lr=1e-3))
    module.policy = policy
    optimizer = module.make_optimizer(module._parameter_groups())
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert len(rates) == len(policy.adapter_parameters())
    for name, parameter in policy.adapter_parameters().items():
        assert rates[id(parameter)] == pytest.approx(16e-3 if ".lora_B." in name else 1e-3)
