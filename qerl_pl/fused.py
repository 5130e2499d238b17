"""Elementwise operations, each one kernel on a GPU (``torch.compile``) and plain PyTorch elsewhere. All compute in FP32
and round once.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` for tensors on a GPU."""

    @wraps(function)
    def call(*args: Any) -> Any:
        return (_compiled(function) if args[0].is_cuda else function)(*args)

    return call


@fused
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean x² + eps) · weight over the last dimension, in the dtype of x [..., H]; weight [H] FP32."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * weight).to(x.dtype)


@fused
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [T, heads, D] by cos, sin [T, D] (halves rotated, as in Hugging Face)."""
    a, b = x.float().chunk(2, dim=-1)
    y = torch.cat((a, b), -1) * cos.unsqueeze(1) + torch.cat((-b, a), -1) * sin.unsqueeze(1)
    return y.to(x.dtype)


@fused
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    return (silu(gate.float()) * up.float()).to(gate.dtype)


@fused
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``swiglu`` with respect to gate and up."""
    dy, g, u = grad.float(), gate.float(), up.float()
    sigmoid = torch.sigmoid(g)
    return (dy * u * sigmoid * (1 + g * (1 - sigmoid))).to(gate.dtype), (dy * g * sigmoid).to(up.dtype)


@fused
def token_statistics(
    logits: Tensor, targets: Tensor, slope: torch.dtype | None = None, entropy_slope: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """log p(target) [N] and entropy H [N] in nats of logits [N, V]; with a dtype for ``slope`` also the derivatives
    with respect to the logits [N, V]: of the first, 1[target] − p, and with ``entropy_slope`` of the second,
    −p (log p + H).

    Entries of −∞ (masked parts of a vocabulary) have probability 0.
    """
    logprobs = logits - logits.logsumexp(-1, keepdim=True)
    p = logprobs.exp()
    finite = logprobs.clamp(min=torch.finfo(torch.float32).min)
    entropy = -(p * finite).sum(-1)
    chosen = logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    if slope is None:
        return chosen, entropy, None, None
    hit = torch.arange(logits.shape[-1], device=logits.device) == targets.unsqueeze(-1)
    of_entropy = (-p * (finite + entropy.unsqueeze(-1))).to(slope) if entropy_slope else None
    return chosen, entropy, (hit.float() - p).to(slope), of_entropy
