"""Group-relative advantages (paper Eq. 4)."""

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, groups: Tensor, scale: str = "group") -> Tensor:
    """A_i = (r_i − mean) / std over the completions of one prompt: rewards [B], groups [B] -> [B].

    ``scale``: divide by the ``group``'s standard deviation (unbiased), by that of the whole ``batch``, or by nothing
    (``none``). Groups whose rewards are all equal get 0. A NaN reward (every verifier abstained) is left out of mean
    and std and
    gets 0.
    """
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale_rewards: {scale!r} is not one of group, batch, none")
    known = ~rewards.isnan()
    advantages = torch.zeros_like(rewards)
    for group in groups.unique().tolist():
        rows = (groups == group) & known
        values = rewards[rows]
        if len(values) < 2 or values.min() == values.max():
            continue
        centred = values - values.mean()
        advantages[rows] = centred / values.std() if scale == "group" else centred
    if scale == "batch" and int(known.sum()) > 1 and (spread := rewards[known].std()) > 0:
        advantages = advantages / spread
    return advantages


def zero_std_fraction(rewards: Tensor, groups: Tensor) -> float:
    """Share of the groups whose rewards are all equal and that therefore teach nothing."""
    ids = groups.unique().tolist()
    equal = sum(bool((r := rewards[(groups == g) & ~rewards.isnan()]).numel() < 2 or r.min() == r.max()) for g in ids)
    return equal / max(1, len(ids))
