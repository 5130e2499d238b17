"""The clipped surrogate by hand, and its invariances."""

import math

import pytest
import torch

from qerl_pl.losses import Loss, clipped_surrogate, importance_weights, k3, token_weights


def surrogate(ratios, advantages, clip=(0.8, 1.28), **kwargs):
    """Loss of one-row-a-token batches whose ratios are given."""
    logprobs = torch.tensor(ratios).log().unsqueeze(-1)
    ones = torch.ones_like(logprobs)
    return clipped_surrogate(
        logprobs,
        torch.zeros_like(logprobs),
        torch.tensor(advantages),
        ones.bool(),
        ones / len(ratios),
        ones,
        clip,
        **kwargs,
    )


def test_clipping_by_hand():
    # A > 0 gains nothing above 1.28, A < 0 nothing below 0.8; the other two sides are not clipped.
    loss, metrics = surrogate([1.5, 0.5, 1.5, 0.5, 1.0], [1.0, -1.0, -1.0, 1.0, 2.0])
    assert loss.item() == pytest.approx(-(1.28 - 0.8 - 1.5 + 0.5 + 2.0) / 5)
    assert metrics["clip_ratio/high"].item() == pytest.approx(1 / 5)
    assert metrics["clip_ratio/low"].item() == pytest.approx(1 / 5)
    assert metrics["policy/ratio"].item() == pytest.approx(1.0)


def test_kl_term_by_hand():
    # reference / policy = 1/2: k3 = 1/2 − 1 + ln 2
    reference = torch.tensor([[math.log(0.5)]])
    loss, metrics = surrogate([1.0], [0.0], beta=0.1, reference=reference)
    assert metrics["kl"].item() == pytest.approx(0.5 - 1 + math.log(2))
    assert loss.item() == pytest.approx(0.1 * (math.log(2) - 0.5))


def test_gradient_at_ratio_one_is_that_of_reinforce():
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    weights = token_weights(mask, "dapo", 2, 3, 4)
    advantages = torch.tensor([1.0, -2.0])
    loss, _ = clipped_surrogate(logprobs, logprobs.detach(), advantages, mask, weights, torch.ones(2, 2), (0.8, 1.28))
    loss.backward()
    assert logprobs.grad.tolist() == [pytest.approx([-1 / 3, -1 / 3]), pytest.approx([2 / 3, 0.0])]


def test_token_weights_by_hand():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)
    assert token_weights(mask, "dapo", 2, 4, 8)[0].tolist() == [0.25, 0.25, 0.25, 0]
    assert token_weights(mask, "grpo", 2, 4, 8).sum(-1).tolist() == pytest.approx([0.5, 0.5])
    assert token_weights(mask, "dr_grpo", 2, 4, 8).tolist() == [[1 / 16] * 3 + [0], [1 / 16, 0, 0, 0]]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_micro_batches_add_up(loss_type):
    torch.manual_seed(0)
    logprobs = (-torch.rand(8, 10)).requires_grad_()
    old, advantages = logprobs.detach() + 0.3 * torch.randn(8, 10), torch.randn(8)
    mask = torch.arange(10) < torch.randint(1, 11, (8, 1))
    sampler = old + 0.5 * torch.randn(8, 10)

    def gradient(parts):
        total = torch.zeros(8, 10)
        for rows in parts:
            weights = token_weights(mask[rows], loss_type, 8, float(mask.sum()), 10)
            correction = importance_weights(old[rows], sampler[rows], mask[rows], 2.0)
            loss, _ = clipped_surrogate(
                logprobs[rows], old[rows], advantages[rows], mask[rows], weights, correction, (0.8, 1.28)
            )
            total += torch.autograd.grad(loss, logprobs)[0]
        return total

    whole = gradient([torch.arange(8)])
    for parts in ([torch.arange(3), torch.arange(3, 8)], [torch.tensor([i]) for i in (5, 1, 0, 7, 3, 2, 6, 4)]):
        torch.testing.assert_close(gradient(parts), whole)
    assert whole.abs().sum() > 0 and (whole[~mask] == 0).all()


def test_importance_weights_by_hand():
    trainer, sampler = torch.tensor([[0.0, 1.0, -1.0, 5.0]]), torch.zeros(1, 4)
    mask = torch.tensor([[True, True, True, False]])
    assert importance_weights(trainer, sampler, mask, 2.0)[0].tolist() == pytest.approx([1.0, 2.0, math.exp(-1), 1.0])
    assert importance_weights(trainer, sampler, mask, None)[0].tolist() == [1.0] * 4


def test_k3_is_an_unbiased_estimate_of_kl():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    tokens = torch.multinomial(p, 200_000, replacement=True, generator=generator)
    estimate = k3(q.log()[tokens], p.log()[tokens], torch.ones(len(tokens), dtype=torch.bool)).mean()
    assert estimate.item() == pytest.approx(float((p * (p / q).log()).sum()), rel=0.02)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "ppo"}, "loss_type: 'ppo' is not one of dapo, grpo, dr_grpo"),
        ({"num_iterations": 0}, "num_iterations: 0 must be at least 1"),
        ({"epsilon": 1.5}, r"epsilon 1.5 must be in \(0, 1\)"),
        ({"importance_cap": 0.0}, "importance_cap: 0.0 must be above 0"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Loss(**settings)


def test_clip_bounds():
    assert Loss().clip == pytest.approx((0.8, 1.28))
    assert Loss(epsilon=0.1, epsilon_high=None).clip == pytest.approx((0.9, 1.1))
