"""The policy-gradient objective: one formula, of which GRPO, DAPO, GSPO and others are settings (docs/objectives.md).

    loss = − Σ_t w_t · c_t · f_t · S(ρ_t, A)  +  β Σ_t w_t · KL_t  −  η · mean of the entropy

ρ = π_θ/π_old; S is the surrogate (clipped: min(ρA, clip(ρ, 1 − ε, 1 + ε_high) A), paper Eq. 3); w_t spreads the weight
over the tokens of the whole batch (``token_weights``); c_t corrects for completions that came from the sampler's
distribution rather than the trainer's (``importance_weights``); f_t picks the tokens of high entropy.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Kind(NamedTuple):
    """What makes a loss type."""

    surrogate: str  # clipped, cispo or sapo
    level: str  # of the ratio: token, or sequence (the geometric mean of a completion's)
    average: str  # token, sequence, constant or sum


KINDS = {
    "dapo": Kind("clipped", "token", "token"),
    "grpo": Kind("clipped", "token", "sequence"),
    "bnpo": Kind("clipped", "token", "token"),
    "dr_grpo": Kind("clipped", "token", "constant"),
    "gspo": Kind("clipped", "sequence", "sequence"),
    "luspo": Kind("clipped", "sequence", "sum"),
    "cispo": Kind("cispo", "token", "token"),
    "sapo": Kind("sapo", "token", "sequence"),
}


@dataclass
class Loss:
    """Settings of the objective, under the field's names; docs/objectives.md has the equation of each.

    Args:
        loss_type: dapo, bnpo: every token of the batch alike; grpo: every
            completion alike, and its tokens within it; dr_grpo: sum over tokens divided by completions ×
            max_completion_length; gspo: as grpo, with one ratio for a completion; luspo: as gspo, summed over tokens;
            cispo: REINFORCE with a capped ratio as weight; sapo: as grpo, with a smooth gate in place of the clip.
        epsilon: lower clip range of the ratio.
        epsilon_high: upper clip range; none for the same as epsilon. DAPO's clip-higher is 0.28. With cispo: the cap of
            the ratio itself (5, say).
        delta: upper limit of the ratio where the clip does not reach (negative advantages); none for no limit.
        beta: weight of the KL term against the base; 0 leaves it out (as in the paper's runs).
        kl_estimator: k1, k2 or k3 (Schulman).
        use_bias_correction_kl: multiply the KL term by the ratio, which makes it unbiased after the first update.
        num_iterations: μ, passes over each rollout batch.
        num_minibatches: optimizer steps in one pass.
        importance_cap: C of the correction π_old/π_sampler; none turns the correction off.
        importance_level: token, or sequence: the product over a completion.
        importance_mode: truncate: min(ratio, C); mask: 0 above C.
        top_entropy_quantile: only this share of the tokens, those of the highest entropy, carry the policy's gradient.
        entropy_coef: η, weight of the mean entropy of a token as a bonus.
        sapo_temperature_pos: of sapo's gate where the advantage is positive.
        sapo_temperature_neg: of sapo's gate elsewhere.
        mask_truncated_completions: leave completions that hit the length limit out of the loss.
    """

    loss_type: str = "dapo"
    epsilon: float = 0.2
    epsilon_high: float | None = 0.28
    delta: float | None = None
    beta: float = 0.0
    kl_estimator: str = "k3"
    use_bias_correction_kl: bool = False
    num_iterations: int = 1
    num_minibatches: int = 1
    importance_cap: float | None = 2.0
    importance_level: str = "token"
    importance_mode: str = "truncate"
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    mask_truncated_completions: bool = False

    def __post_init__(self) -> None:
        for name, choices in (
            ("loss_type", tuple(KINDS)),
            ("kl_estimator", ("k1", "k2", "k3")),
            ("importance_level", ("token", "sequence")),
            ("importance_mode", ("truncate", "mask")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not one of {', '.join(choices)}")
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name}: {value} must be a finite number")
        for name in ("num_iterations", "num_minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 1")
        if not 0 < self.epsilon < 1 or (self.epsilon_high is not None and self.epsilon_high <= 0):
            raise ValueError(f"epsilon {self.epsilon} must be in (0, 1) and epsilon_high {self.epsilon_high} above 0")
        if self.loss_type == "cispo" and (self.epsilon_high is None or self.epsilon_high < 1):
            raise ValueError(
                f"epsilon_high: {self.epsilon_high} with cispo, where it caps the ratio itself; give 1 or more "
                "(5 is usual)"
            )
        if self.delta is not None and self.delta <= self.clip[1]:
            raise ValueError(f"delta: {self.delta} must be above the upper clip bound {self.clip[1]:g}, or null")
        for name in ("importance_cap", "sapo_temperature_pos", "sapo_temperature_neg"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                null = ", or null for no correction" if name == "importance_cap" else ""
                raise ValueError(f"{name}: {value} must be above 0{null}")
        for name in ("beta", "entropy_coef"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 0; 0 leaves the term out")
        if not 0 < self.top_entropy_quantile <= 1:
            raise ValueError(f"top_entropy_quantile: {self.top_entropy_quantile} must be in (0, 1]; 1 is all tokens")

    @property
    def kind(self) -> Kind:
        return KINDS[self.loss_type]

    @property
    def clip(self) -> tuple[float, float]:
        """Bounds of the ratio."""
        return 1 - self.epsilon, 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)


def token_weights(mask: Tensor, loss_type: str, completions: float, tokens: float, max_length: int) -> Tensor:
    """w [B, T] for a completion mask [B, T] that may be any part of the batch.

    ``completions`` and ``tokens`` count the whole batch, all micro-batches; ``max_length`` is the completion limit.
    """
    lengths = mask.sum(-1, keepdim=True).clamp(min=1)
    denominators = {
        "token": tokens,
        "sequence": completions * lengths,
        "constant": completions * max_length,
        "sum": completions,
    }
    denominator = torch.as_tensor(denominators[KINDS[loss_type].average], device=mask.device)
    return mask / denominator.clamp(min=1)


def importance_ratio(trainer: Tensor, sampler: Tensor, mask: Tensor, level: str = "token") -> Tensor:
    """π_trainer/π_sampler [B, T] at completion tokens, or their product over the completion at each of its tokens
    (``sequence``); 1 elsewhere, and a constant to the gradient. Log-probabilities and mask are [B, T].
    """
    log_ratio = torch.where(mask, trainer - sampler, 0.0).detach()
    if level == "sequence":
        log_ratio = torch.where(mask, log_ratio.sum(-1, keepdim=True), 0.0)
    return log_ratio.exp()


def importance_weights(ratio: Tensor, cap: float | None, mode: str = "truncate") -> Tensor:
    """c from the ratio: at most ``cap`` (truncate), or 0 above it (mask); 1 without a cap."""
    if cap is None:
        return torch.ones_like(ratio)
    return ratio.clamp(max=cap) if mode == "truncate" else torch.where(ratio > cap, 0.0, ratio)


def policy_loss(
    settings: Loss,
    logprobs: Tensor,  # [B, T], with gradient
    old: Tensor,  # [B, T]: of the policy that the batch is updated from
    advantages: Tensor,  # [B]
    mask: Tensor,  # [B, T] bool
    weights: Tensor,  # [B, T]: token_weights
    correction: Tensor,  # [B, T]: importance_weights
    reference: Tensor | None = None,  # [B, T]: of the base; with beta
    focus: Tensor | None = None,  # [B, T] bool: tokens of high entropy
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one micro-batch (a sum: micro-batches add up to the loss of the batch), and means over its tokens."""
    log_ratio = torch.where(mask, logprobs - old, 0.0)
    if settings.kind.level == "sequence":
        log_ratio = (log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(log_ratio)
    ratio = log_ratio.exp()  # is one at the first update
    advantage = advantages.unsqueeze(-1)  # [B, 1]
    objective = _surrogate(settings, ratio, logprobs, advantage) * correction
    if focus is not None:
        objective = objective * focus
    loss = -(weights * objective).sum()
    low, high = (-float("inf"), settings.epsilon_high or 1) if settings.loss_type == "cispo" else settings.clip
    either_way = settings.kind.surrogate == "cispo"  # its cap does not ask for the sign
    metrics = {
        "clip_ratio/low": ((ratio < low) & (advantage < 0)).float(),
        "clip_ratio/high": ((ratio > high) & ((advantage > 0) | either_way)).float(),
        "policy/ratio": ratio,
    }
    if settings.beta:
        assert reference is not None
        kl = kl_divergence(settings.kl_estimator, reference, logprobs, mask)
        if settings.use_bias_correction_kl:
            kl = kl * ratio
        loss = loss + settings.beta * (weights * kl).sum()
        metrics["kl"] = kl
    return loss, {
        name: value.detach()[mask].mean() if mask.any() else value.new_zeros(()) for name, value in metrics.items()
    }


def _surrogate(settings: Loss, ratio: Tensor, logprobs: Tensor, advantage: Tensor) -> Tensor:  # [B, T]
    match settings.kind.surrogate:
        case "cispo":
            return ratio.clamp(max=settings.epsilon_high).detach() * advantage * logprobs
        case "sapo":
            temperature = torch.where(advantage > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg)
            return torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantage
    clipped = ratio.clamp(*settings.clip)
    limited = ratio if settings.delta is None else ratio.clamp(max=settings.delta)
    return torch.minimum(limited * advantage, clipped * advantage)


def entropy_threshold(entropy: Tensor, mask: Tensor, share: float) -> float:
    """The entropy that ``share`` of the tokens of the mask reach, more where they tie; both [B, T]."""
    ordered = entropy[mask].float().sort().values
    if not len(ordered):  # all completions were cut off, and such have no loss
        return math.inf
    position = (1 - share) * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (position - below) * (ordered[above] - ordered[below]))


def kl_divergence(estimator: str, other: Tensor, sampled: Tensor, mask: Tensor) -> Tensor:
    """Estimates of KL(sampled ‖ other) at tokens drawn from ``sampled`` [B, T]; 0 off the mask.

    With x = log other − log sampled: k1 = −x (unbiased; its gradient has expectation 0), k2 = x²/2 (its gradient is
    that of the KL), k3 = eˣ − 1 − x (unbiased, never negative).
    """
    x = torch.where(mask, other - sampled, 0.0)
    return {"k1": lambda: -x, "k2": lambda: x.square() / 2, "k3": lambda: x.exp() - 1 - x}[estimator]()


def k3(other: Tensor, sampled: Tensor, mask: Tensor) -> Tensor:
    """The estimate of KL(sampled ‖ other) that is never negative."""
    return kl_divergence("k3", other, sampled, mask)
