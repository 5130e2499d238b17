"""The objective by hand, and its invariances. Against TRL: test_trl_parity.py."""

import math

import pytest
import torch

from qerl_pl.losses import (
    KINDS,
    Loss,
    entropy_threshold,
    importance_ratio,
    importance_weights,
    k3,
    kl_divergence,
    policy_loss,
    token_weights,
)


def surrogate(ratios, advantages, reference=None, **settings):
    """Loss of one-row-a-token batches whose ratios are given."""
    logprobs = torch.tensor(ratios).log().unsqueeze(-1)
    ones = torch.ones_like(logprobs)
    return policy_loss(
        Loss(**settings),
        logprobs,
        torch.zeros_like(logprobs),
        torch.tensor(advantages),
        ones.bool(),
        ones / len(ratios),
        ones,
        reference,
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
    loss, _ = policy_loss(Loss(), logprobs, logprobs.detach(), advantages, mask, weights, torch.ones(2, 2))
    loss.backward()
    assert logprobs.grad.tolist() == [pytest.approx([-1 / 3, -1 / 3]), pytest.approx([2 / 3, 0.0])]


def test_token_weights_by_hand():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)
    assert token_weights(mask, "dapo", 2, 4, 8)[0].tolist() == [0.25, 0.25, 0.25, 0]
    assert token_weights(mask, "grpo", 2, 4, 8).sum(-1).tolist() == pytest.approx([0.5, 0.5])
    assert token_weights(mask, "dr_grpo", 2, 4, 8).tolist() == [[1 / 16] * 3 + [0], [1 / 16, 0, 0, 0]]


@pytest.mark.parametrize("loss_type", list(KINDS))
def test_micro_batches_add_up(loss_type):
    settings = Loss(loss_type=loss_type, epsilon_high=1.5 if loss_type == "cispo" else 0.28, beta=0.1)
    torch.manual_seed(0)
    logprobs = (-torch.rand(8, 10)).requires_grad_()
    old, advantages = logprobs.detach() + 0.3 * torch.randn(8, 10), torch.randn(8)
    mask = torch.arange(10) < torch.randint(1, 11, (8, 1))
    sampler, base = old + 0.5 * torch.randn(8, 10), old + 0.5 * torch.randn(8, 10)

    def gradient(parts):
        total = torch.zeros(8, 10)
        for rows in parts:
            weights = token_weights(mask[rows], loss_type, 8, float(mask.sum()), 10)
            correction = importance_weights(importance_ratio(old[rows], sampler[rows], mask[rows]), 2.0)
            loss, _ = policy_loss(
                settings, logprobs[rows], old[rows], advantages[rows], mask[rows], weights, correction, base[rows]
            )
            total += torch.autograd.grad(loss, logprobs)[0]
        return total

    whole = gradient([torch.arange(8)])
    for parts in ([torch.arange(3), torch.arange(3, 8)], [torch.tensor([i]) for i in (5, 1, 0, 7, 3, 2, 6, 4)]):
        torch.testing.assert_close(gradient(parts), whole)
    assert whole.abs().sum() > 0 and (whole[~mask] == 0).all()


@pytest.mark.parametrize("loss_type", list(KINDS))
def test_padding_and_order_do_not_matter(loss_type):
    settings = Loss(loss_type=loss_type, epsilon_high=1.5 if loss_type == "cispo" else 0.28)
    torch.manual_seed(1)
    logprobs, old, advantages = -torch.rand(4, 6), -torch.rand(4, 6), torch.randn(4)
    mask = torch.arange(6) < torch.tensor([[6], [2], [4], [1]])

    def loss(rows, left):
        def place(x):  # the same tokens, shifted to the end of a longer row
            return torch.cat([torch.full((4, 3), 9.0), x.float()], 1)[rows] if left else x.float()[rows]

        keep = place(mask).eq(1)
        weights = token_weights(keep, loss_type, 4, float(mask.sum()), 10)
        ones = torch.ones_like(weights)
        return policy_loss(settings, place(logprobs), place(old), advantages[rows], keep, weights, ones)[0]

    expected = loss(torch.arange(4), False)
    torch.testing.assert_close(loss(torch.tensor([2, 0, 3, 1]), False), expected)
    torch.testing.assert_close(loss(torch.arange(4), True), expected)


@pytest.mark.parametrize("loss_type", [name for name in KINDS if name != "cispo"])  # its gradient is no derivative
def test_gradient_is_the_derivative(loss_type):
    """Against finite differences in float64, away from the corners of the clip."""
    torch.manual_seed(2)
    old, base = -torch.rand(3, 4, dtype=torch.float64), -torch.rand(3, 4, dtype=torch.float64)
    logprobs = (old + 0.3 * torch.randn(3, 4, dtype=torch.float64)).requires_grad_()
    mask = torch.arange(4) < torch.tensor([[4], [2], [3]])
    advantages, correction = torch.tensor([1.0, -0.5, -2.0]).double(), torch.rand(3, 4).double()
    settings = Loss(loss_type=loss_type, beta=0.2, delta=1.6)
    weights = token_weights(mask, loss_type, 3, 9, 4).double()
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(settings, x, old, advantages, mask, weights, correction, base)[0], (logprobs,)
    )


def test_one_ratio_for_a_completion_by_hand():
    # Ratios 2 and 1/2 of one completion have the geometric mean 1; 2 and 2 of the other are clipped at 1.28.
    logprobs = torch.tensor([[2.0, 0.5], [2.0, 2.0]]).log()
    mask, ones = torch.ones(2, 2, dtype=torch.bool), torch.ones(2, 2)
    for loss_type, tokens in (("gspo", 1), ("luspo", 2)):
        weights = token_weights(mask, loss_type, 2, 4, 8)
        loss, metrics = policy_loss(
            Loss(loss_type=loss_type), logprobs, torch.zeros(2, 2), torch.tensor([3.0, 5.0]), mask, weights, ones
        )
        assert loss.item() == pytest.approx(-tokens * (1 * 3 + 1.28 * 5) / 2)
        assert metrics["policy/ratio"].item() == pytest.approx((1 + 1 + 2 + 2) / 4)


def test_cispo_by_hand():
    # −min(ρ, cap) · A · log π, the first factor a constant
    logprobs = torch.tensor([[2.0], [1.2]]).log().requires_grad_()
    ones = torch.ones(2, 1)
    settings = Loss(loss_type="cispo", epsilon_high=1.5)
    loss, _ = policy_loss(settings, logprobs, torch.zeros(2, 1), torch.tensor([1.0, -1.0]), ones.bool(), ones / 2, ones)
    assert loss.item() == pytest.approx(-(1.5 * math.log(2) - 1.2 * math.log(1.2)) / 2)
    assert torch.autograd.grad(loss, logprobs)[0].flatten().tolist() == pytest.approx([-0.75, 0.6])


def test_sapo_by_hand():
    loss, _ = surrogate([1.0, 2.0, 2.0], [1.0, 1.0, -1.0], loss_type="sapo", sapo_temperature_neg=2.0)
    gate = 4 / (1 + math.exp(-1)), 4 / 2 / (1 + math.exp(-2))  # 4/τ σ(τ (ρ − 1)) at ρ = 2, for τ = 1 and 2
    assert loss.item() == pytest.approx(-(2.0 + gate[0] - gate[1]) / 3)


def test_two_sided_clip_by_hand():
    # With A < 0 the ratio has no upper bound but delta.
    assert surrogate([3.0], [-1.0])[0].item() == pytest.approx(3.0)
    assert surrogate([3.0], [-1.0], delta=2.0)[0].item() == pytest.approx(2.0)


def test_focus_by_hand():
    entropy = torch.tensor([[0.1, 0.4, 9.0], [0.2, 0.3, 9.0]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    assert entropy_threshold(entropy, mask, 0.5) == pytest.approx(0.25)
    assert entropy_threshold(entropy, mask & False, 0.5) == math.inf  # no token left: all were cut off
    assert entropy_threshold(entropy, mask, 0.75) == pytest.approx(
        float(torch.quantile(torch.tensor([0.1, 0.2, 0.3, 0.4]), 0.25))
    )
    ones = torch.ones(2, 3)
    logprobs = torch.zeros(2, 3, requires_grad=True)
    loss, _ = policy_loss(
        Loss(), logprobs, torch.zeros(2, 3), torch.tensor([1.0, 2.0]), mask, mask / 4, ones, focus=entropy > 0.25
    )
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == [
        pytest.approx([0, -1 / 4, 0]),
        pytest.approx([0, -1 / 2, 0]),
    ]


def test_importance_weights_by_hand():
    trainer, sampler = torch.tensor([[0.0, 1.0, -1.0, 5.0]]), torch.zeros(1, 4)
    mask = torch.tensor([[True, True, True, False]])
    ratio = importance_ratio(trainer, sampler, mask)
    assert ratio[0].tolist() == pytest.approx([1.0, math.e, math.exp(-1), 1.0])
    assert importance_weights(ratio, 2.0)[0].tolist() == pytest.approx([1.0, 2.0, math.exp(-1), 1.0])
    assert importance_weights(ratio, 2.0, "mask")[0].tolist() == pytest.approx([1.0, 0.0, math.exp(-1), 1.0])
    assert importance_weights(ratio, None)[0].tolist() == [1.0] * 4
    # The product over the completion: e^(0 + 1 − 1)
    assert importance_ratio(trainer, sampler, mask, "sequence")[0].tolist() == pytest.approx([1.0] * 4)
    assert importance_ratio(trainer + 0.5, sampler, mask, "sequence")[0].tolist() == pytest.approx(
        [math.exp(1.5)] * 3 + [1]
    )


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimates_are_unbiased(estimator):
    generator = torch.Generator().manual_seed(0)
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    tokens = torch.multinomial(p, 200_000, replacement=True, generator=generator)
    ones = torch.ones(len(tokens), dtype=torch.bool)
    estimate = kl_divergence(estimator, q.log()[tokens], p.log()[tokens], ones).mean()
    assert estimate.item() == pytest.approx(float((p * (p / q).log()).sum()), rel=0.03)


def test_the_gradient_of_k2_is_that_of_the_kl():
    logits = torch.tensor([1.0, 0.2, -0.5], requires_grad=True)
    q = torch.tensor([0.5, 0.3, 0.2]).log()
    p = logits.log_softmax(-1)
    exact = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)[0]
    k2 = kl_divergence("k2", q, p, torch.ones(3, dtype=torch.bool))
    sampled = torch.autograd.grad((p.detach().exp() * k2).sum(), logits)[0]  # every token as often as it is drawn
    torch.testing.assert_close(sampled, exact)


def test_k3_is_an_unbiased_estimate_of_kl():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    tokens = torch.multinomial(p, 200_000, replacement=True, generator=generator)
    estimate = k3(q.log()[tokens], p.log()[tokens], torch.ones(len(tokens), dtype=torch.bool)).mean()
    assert estimate.item() == pytest.approx(float((p * (p / q).log()).sum()), rel=0.02)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "ppo"}, "loss_type: 'ppo' is not one of dapo, grpo, bnpo, dr_grpo, gspo, luspo, cispo, sapo"),
        ({"kl_estimator": "k4"}, "kl_estimator: 'k4' is not one of k1, k2, k3"),
        ({"importance_mode": "drop"}, "importance_mode: 'drop' is not one of truncate, mask"),
        ({"loss_type": "cispo"}, "epsilon_high: 0.28 with cispo"),
        ({"importance_cap": math.nan}, "importance_cap: nan must be a finite number"),
        ({"entropy_coef": math.inf}, "entropy_coef: inf must be a finite number"),
        ({"beta": -1.0}, "beta: -1.0 must be at least 0"),
        ({"entropy_coef": -1.0}, "entropy_coef: -1.0 must be at least 0"),
        ({"delta": 1.1}, "delta: 1.1 must be above the upper clip bound 1.28"),
        ({"top_entropy_quantile": 0.0}, r"top_entropy_quantile: 0.0 must be in \(0, 1\]"),
        ({"sapo_temperature_pos": 0.0}, "sapo_temperature_pos: 0.0 must be above 0"),
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
