"""Token log-probabilities and entropy from hidden states, without ever holding the logits of a whole batch."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def token_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy of softmax(hidden · headᵀ / temperature), in nats and FP32.

    hidden [N, H], head [V, H], targets [N] -> ([N], [N]). At most ``chunk`` × V logits exist at a time, in forward
    and in backward, where each chunk is computed again. The entropy carries no gradient.
    """
    if len(targets) == 0:
        return hidden.new_zeros(0, dtype=torch.float32), hidden.new_zeros(0, dtype=torch.float32)
    parts = []
    for start in range(0, len(targets), chunk):
        args = (hidden[start : start + chunk], head, targets[start : start + chunk], temperature, bias)
        keep = torch.is_grad_enabled() and hidden.requires_grad
        parts.append(checkpoint(_chunk, *args, use_reentrant=False) if keep else _chunk(*args))
    logprobs, entropy = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


def _chunk(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    with torch.autocast(hidden.device.type, enabled=False):
        logits = hidden.float() @ head.float().T  # [n, V]
        if bias is not None:
            logits = logits + bias.float()
        logprobs = (logits / temperature).log_softmax(-1)
    with torch.no_grad():
        # 0 · (−inf) counts as 0, for vocabularies with masked entries
        entropy = -(logprobs.exp() * logprobs.clamp(min=torch.finfo(torch.float32).min)).sum(-1)
    return logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy
