"""The trainer's layers against Hugging Face's own. Twin: gpu/test_kernels.py."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from qerl_pl import fused
from qerl_pl.layers import Packing, attention, use_packed_layers
from tests.reference import small


def test_packing_by_hand() -> None:
    packing = Packing.of(torch.tensor([2, 3, 1]))
    assert packing.starts.tolist() == [0, 2, 5, 6] and packing.starts.dtype == torch.int32
    assert packing.lengths == (2, 3, 1)
    assert packing.positions().tolist() == [0, 1, 0, 1, 2, 0]
    position, mask = packing.padded()
    assert position.tolist() == [[0, 1, 2], [2, 3, 4], [5, 5, 5]]
    assert mask.tolist() == [[True, True, False], [True, True, True], [True, False, False]]


def test_attention_by_hand() -> None:
    """Each sequence alone, head by head, in float64."""
    generator = torch.Generator().manual_seed(0)
    lengths = [4, 1, 6]
    q, k, v = (torch.randn(11, heads, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2))
    ours = attention(q, k, v, Packing.of(torch.tensor(lengths)), 0.3)
    start = 0
    for length in lengths:
        for head in range(4):
            for t in range(length):
                keys, values = k[start : start + t + 1, head // 2], v[start : start + t + 1, head // 2]
                p = (0.3 * keys @ q[start + t, head]).softmax(0)
                torch.testing.assert_close(ours[start + t, head], p @ values)
        start += length


@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config])
def test_a_packed_decoder_is_the_padded_one(kind: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**small(), tie_word_embeddings=True, head_dim=32)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    tokens = torch.randint(100, (2, 7))
    want = [model.model(tokens[:1]).last_hidden_state[0], model.model(tokens[1:, :5]).last_hidden_state[0]]
    for layer in model.model.layers:  # plain linears do not know the product of the MLP
        layer.mlp.down_proj.forward = lambda x, up, down=layer.mlp.down_proj: torch.nn.functional.linear(
            fused.swiglu(x, up), down.weight
        )
    use_packed_layers(model)
    row, packing = torch.cat([tokens[0], tokens[1, :5]]), Packing.of(torch.tensor([7, 5]))
    x = model.model.embed_tokens(row[None])
    tables = model.model.rotary_emb(x, packing.positions()[None])
    for layer in model.model.layers:
        x = layer(x, position_embeddings=tables, packing=packing)
    torch.testing.assert_close(model.model.norm(x)[0], torch.cat(want), atol=2e-5, rtol=1e-4)


def test_what_is_not_supported() -> None:
    model = AutoModelForCausalLM.from_config(Qwen2Config(**small() | {"hidden_act": "gelu"}))
    with pytest.raises(ValueError, match="Qwen2ForCausalLM: hidden_act 'gelu'; only silu is supported"):
        use_packed_layers(model)
    config = Qwen2Config(**small(), use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn has a sliding window"):
        use_packed_layers(AutoModelForCausalLM.from_config(config))


def test_swiglu_gradient_is_autograds() -> None:
    inputs = [torch.randn(5, 7, dtype=torch.float64).float().requires_grad_() for _ in range(2)]
    grad = torch.randn(5, 7)
    want = torch.autograd.grad(torch.nn.functional.silu(inputs[0]) * inputs[1], inputs, grad)
    for a, b in zip(fused.swiglu_backward(grad, *(t.detach() for t in inputs)), want, strict=True):
        torch.testing.assert_close(a, b)


def test_token_statistics_with_a_masked_vocabulary() -> None:
    logits: Tensor = torch.tensor([[1.0, 3.0, -torch.inf], [0.0, 0.0, 0.0]])
    chosen, entropy, slope, _ = fused.token_statistics(logits, torch.tensor([1, 2]), torch.float32)
    p = torch.tensor([1.0, 3.0]).softmax(0)
    torch.testing.assert_close(chosen, torch.stack([p[1].log(), torch.tensor(3.0).log().neg()]))
    torch.testing.assert_close(entropy, torch.stack([-(p * p.log()).sum(), torch.tensor(3.0).log()]))
    assert slope is not None
    torch.testing.assert_close(slope[0], torch.tensor([-p[0], 1 - p[1], 0]))
    assert fused.token_statistics(logits, torch.tensor([1, 2]))[2] is None
