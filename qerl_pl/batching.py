"""Parts of a rollout batch: minibatches for optimizer steps, micro-batches for memory."""

import torch
from torch import Tensor


def minibatches(size: int, parts: int, seed: int) -> list[Tensor]:
    """Row indices [size / parts] of each part; all rows in their order if there is one part, else shuffled."""
    if parts > size:
        raise ValueError(f"num_minibatches: {parts} is more than the {size} completions of a batch")
    rows = torch.arange(size) if parts == 1 else torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    return list(rows.tensor_split(parts))


def micro_batches(lengths: Tensor, rows: Tensor, budget: int) -> list[Tensor]:
    """Split ``rows`` so that the lengths of each part add up to at most ``budget`` tokens; similar lengths go together.

    A single row longer than the budget is a part of its own.
    """
    ordered = rows[lengths[rows].argsort(descending=True, stable=True)]
    parts: list[list[int]] = []
    tokens = 0
    for row in ordered.tolist():
        if not parts or tokens + int(lengths[row]) > budget:
            parts.append([])
            tokens = 0
        parts[-1].append(row)
        tokens += int(lengths[row])
    return [torch.tensor(part) for part in parts]
