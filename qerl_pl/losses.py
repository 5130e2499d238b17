"""The policy-gradient objective: one clipped surrogate, of which GRPO, DAPO and Dr. GRPO are settings.

    loss = − Σ_t w_t · c_t · min(ρ_t A, clip(ρ_t, 1 − ε, 1 + ε_high) A)  +  β Σ_t w_t · KL_t          (paper Eq. 3)

ρ = π_θ/π_old; w_t spreads a total weight of one over the tokens of the whole batch (``token_weights``); c_t corrects
for completions that came from the sampler's distribution rather than the trainer's (``importance_weights``).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LOSS_TYPES = ("dapo", "grpo", "dr_grpo")


@dataclass
class Loss:
    """Settings of the objective, under the field's names.

    Args:
        loss_type: how tokens are averaged. dapo: every token of the batch alike; grpo: every completion alike, and
            its tokens within it; dr_grpo: sum over tokens divided by completions × max_completion_length.
        epsilon: lower clip range of the ratio.
        epsilon_high: upper clip range; none for the same as epsilon. DAPO's clip-higher is 0.28.
        beta: weight of the KL term against the base; 0 leaves it out (as in the paper's runs).
        num_iterations: μ, passes over each rollout batch.
        num_minibatches: optimizer steps in one pass.
        importance_cap: C of truncated importance sampling, min(π_old/π_sampler, C); none turns the correction off.
        mask_truncated_completions: leave completions that hit the length limit out of the loss.
    """

    loss_type: str = "dapo"
    epsilon: float = 0.2
    epsilon_high: float | None = 0.28
    beta: float = 0.0
    num_iterations: int = 1
    num_minibatches: int = 1
    importance_cap: float | None = 2.0
    mask_truncated_completions: bool = False

    def __post_init__(self) -> None:
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(f"loss_type: {self.loss_type!r} is not one of {', '.join(LOSS_TYPES)}")
        for name in ("num_iterations", "num_minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 1")
        if not 0 < self.epsilon < 1 or (self.epsilon_high is not None and self.epsilon_high <= 0):
            raise ValueError(f"epsilon {self.epsilon} must be in (0, 1) and epsilon_high {self.epsilon_high} above 0")
        if self.importance_cap is not None and self.importance_cap <= 0:
            raise ValueError(f"importance_cap: {self.importance_cap} must be above 0, or null for no correction")

    @property
    def clip(self) -> tuple[float, float]:
        """Bounds of the ratio."""
        return 1 - self.epsilon, 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)


def token_weights(mask: Tensor, loss_type: str, completions: float, tokens: float, max_length: int) -> Tensor:
    """w [B, T] for a completion mask [B, T] that may be any part of the batch.

    ``completions`` and ``tokens`` count the whole batch, all micro-batches; ``max_length`` is the
    completion limit.
    """
    lengths = mask.sum(-1, keepdim=True).clamp(min=1)
    denominator = {"dapo": tokens, "grpo": completions * lengths, "dr_grpo": completions * max_length}[loss_type]
    return mask / torch.as_tensor(denominator, device=mask.device).clamp(min=1)


def importance_weights(trainer: Tensor, sampler: Tensor, mask: Tensor, cap: float | None) -> Tensor:
    """min(exp(log π_trainer − log π_sampler), C) at each completion token, 1 elsewhere; a constant to the gradient.
    All [B, T].
    """
    if cap is None:
        return torch.ones_like(trainer)
    ratio = (trainer - sampler).detach().exp().clamp(max=cap)
    return torch.where(mask, ratio, 1.0)


def clipped_surrogate(
    logprobs: Tensor,  # [B, T], with gradient
    old: Tensor,  # [B, T]: of the policy that the batch is updated from
    advantages: Tensor,  # [B]
    mask: Tensor,  # [B, T] bool
    weights: Tensor,  # [B, T]: token_weights
    correction: Tensor,  # [B, T]: importance_weights
    clip: tuple[float, float],
    beta: float = 0.0,
    reference: Tensor | None = None,  # [B, T]: of the base
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one micro-batch (a sum: micro-batches add up to the loss of the batch), and means over its tokens."""
    ratio = torch.where(mask, logprobs - old, 0.0).exp()  # is one at the first update
    advantage = advantages.unsqueeze(-1)  # [B, 1]
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(*clip) * advantage)
    loss = -(weights * correction * surrogate).sum()
    metrics = {
        "clip_ratio/low": ((ratio < clip[0]) & (advantage < 0)).float(),
        "clip_ratio/high": ((ratio > clip[1]) & (advantage > 0)).float(),
        "policy/ratio": ratio,
    }
    if beta:
        assert reference is not None
        kl = k3(reference, logprobs, mask)
        loss = loss + beta * (weights * kl).sum()
        metrics["kl"] = kl
    return loss, {
        name: value.detach()[mask].mean() if mask.any() else value.new_zeros(()) for name, value in metrics.items()
    }


def k3(other: Tensor, sampled: Tensor, mask: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(sampled ‖ other) at tokens drawn from ``sampled``: r − 1 − log r with r =
    other/sampled; 0 off the mask.
    """
    log_ratio = torch.where(mask, other - sampled, 0.0)
    return log_ratio.exp() - 1 - log_ratio
