"""Token log-probabilities and entropy from hidden states, without ever holding the logits of a whole batch."""

from typing import Any

import torch
from torch import Tensor

from qerl_pl.fused import token_statistics


def token_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    chunk: int = 1024,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy of softmax(hidden · headᵀ / temperature), in nats and FP32.

    hidden [N, H], head [V, H], targets [N] -> ([N], [N]). At most ``chunk`` × V logits exist at a time. The entropy
    carries a gradient with ``entropy_grad`` only; the head is frozen.
    """
    logprobs, entropy = _TokenLogprobs.apply(hidden, head, targets, temperature, bias, chunk, entropy_grad)
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):
    """The gradient of log p(target) is known in forward up to its factor: (head[target] − Σ p · head) / temperature;
    that of the entropy likewise. They are computed there, from the logits that are at hand, so that backward need not
    make them again.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, bias: Tensor | None, chunk: int,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        with_grad = ctx.needs_input_grad[0]
        entropy_grad = entropy_grad and with_grad
        logprobs = torch.zeros(len(targets), device=hidden.device)
        entropy = torch.zeros_like(logprobs)
        grads = [torch.empty_like(hidden) if wanted else None for wanted in (with_grad, entropy_grad)]
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(targets), chunk):
                part = slice(start, start + chunk)
                logits = head_logits(hidden[part], head)
                if bias is not None:
                    logits += bias.float()
                logits /= temperature
                dtype = head.dtype if with_grad else None
                logprobs[part], entropy[part], *slopes = token_statistics(logits, targets[part], dtype, entropy_grad)
                del logits
                for grad, slope in zip(grads, slopes, strict=True):
                    if grad is not None:
                        grad[part] = (slope @ head / temperature).to(hidden.dtype)
        ctx.save_for_backward(*grads)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        pairs = [(g, u) for g, u in zip(ctx.saved_tensors, upstream, strict=True) if g is not None]
        total = sum(u.unsqueeze(-1) * g for g, u in pairs)
        assert isinstance(total, Tensor)
        return total.to(pairs[0][0].dtype), None, None, None, None, None, None


def head_logits(hidden: Tensor, head: Tensor) -> Tensor:  # [n, V] FP32, from exact products of BF16 numbers
    if hidden.is_cuda and hidden.dtype == head.dtype != torch.float32:
        return torch.mm(hidden, head.T, out_dtype=torch.float32)
    return hidden.float() @ head.float().T
