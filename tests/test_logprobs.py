"""Chunked log-probabilities against one dense float64 softmax."""

import pytest
import torch

from qerl_pl.logprobs import token_logprobs


def inputs(n=37, hidden=16, vocab=50):
    torch.manual_seed(0)
    return torch.randn(n, hidden), torch.randn(vocab, hidden), torch.randint(0, vocab, (n,)), torch.randn(vocab)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
def test_values_and_gradients(temperature, chunk):
    hidden, head, targets, bias = inputs()
    x = hidden.clone().requires_grad_()
    logprobs, entropy = token_logprobs(x, head, targets, temperature, bias, chunk)
    y = hidden.double().requires_grad_()
    dense = ((y @ head.double().T + bias.double()) / temperature).log_softmax(-1)
    expected = dense[torch.arange(37), targets]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(dense.exp() * dense).sum(-1), rtol=1e-5, atol=1e-5)
    weight = torch.linspace(-1, 1, 37)
    (ours,) = torch.autograd.grad((logprobs * weight).sum(), x)
    (theirs,) = torch.autograd.grad((expected * weight).sum(), y)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)
    assert not entropy.requires_grad


@pytest.mark.parametrize("chunk", [8, 1000])
def test_gradient_of_the_entropy(chunk):
    hidden, head, targets, bias = inputs()
    bias[45:] = -torch.inf  # masked; the reference does without them
    targets %= 45
    x, y = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    logprobs, entropy = token_logprobs(x, head, targets, 0.7, bias, chunk, entropy_grad=True)
    dense = ((y @ head[:45].double().T + bias[:45].double()) / 0.7).log_softmax(-1)
    exact = torch.special.entr(dense.exp()).sum(-1)
    weights = torch.linspace(-1, 1, 37), torch.linspace(2, 0, 37)
    (ours,) = torch.autograd.grad((logprobs * weights[0] + entropy * weights[1]).sum(), x)
    (theirs,) = torch.autograd.grad((dense[torch.arange(37), targets] * weights[0] + exact * weights[1]).sum(), y)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_uniform_distribution_by_hand():
    logprobs, entropy = token_logprobs(torch.zeros(3, 4), torch.randn(8, 4), torch.tensor([0, 3, 7]))
    assert logprobs.tolist() == pytest.approx([-2.0794415] * 3)  # −ln 8
    assert entropy.tolist() == pytest.approx([2.0794415] * 3)


def test_no_tensor_of_all_logits_is_saved():
    hidden, head, targets, _ = inputs(n=64, vocab=200)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        token_logprobs(hidden.requires_grad_(), head, targets, chunk=8)
    assert saved and max(saved) <= 200 * 16  # the head itself is the largest; 64 × 200 logits are not there


def test_masked_vocabulary_gives_finite_entropy():
    bias = torch.zeros(8)
    bias[4:] = -torch.inf
    _, entropy = token_logprobs(torch.zeros(1, 4), torch.randn(8, 4), torch.tensor([0]), bias=bias)
    assert entropy.item() == pytest.approx(1.3862944)  # ln 4


def test_no_tokens():
    logprobs, entropy = token_logprobs(torch.zeros(0, 4), torch.zeros(8, 4), torch.zeros(0, dtype=torch.long))
    assert logprobs.shape == entropy.shape == (0,)
