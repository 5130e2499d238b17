"""Group-relative advantages (paper Eq. 4)."""

import torch
from torch import Tensor

SCALES, BASELINES = ("group", "batch", "none"), ("mean", "leave_one_out")


def group_advantages(rewards: Tensor, groups: Tensor, scale: str = "group", baseline: str = "mean") -> Tensor:
    """A_i = (r_i − b_i) / std over the completions of one prompt: rewards [B], groups [B] -> [B].

    ``baseline`` b_i: the ``mean`` of the group, or that of the others in it (``leave_one_out``, RLOO). ``scale``:
    divide by the ``group``'s standard deviation (unbiased), by that of the whole ``batch``, or by nothing (``none``).
    Groups whose rewards are all equal get 0. A NaN reward (every verifier abstained) is left out of baseline and std
    and gets 0.
    """
    for name, value, choices in (("scale_rewards", scale, SCALES), ("baseline", baseline, BASELINES)):
        if value not in choices:
            raise ValueError(f"{name}: {value!r} is not one of {', '.join(choices)}")
    known = ~rewards.isnan()
    advantages = torch.zeros_like(rewards)
    for group in groups.unique().tolist():
        rows = (groups == group) & known
        values = rewards[rows]
        if len(values) < 2 or values.min() == values.max():
            continue
        centred = values - values.mean()
        if baseline == "leave_one_out":  # the mean of the others is further away, by n / (n − 1)
            centred = centred * len(values) / (len(values) - 1)
        advantages[rows] = centred / values.std() if scale == "group" else centred
    if scale == "batch" and int(known.sum()) > 1 and (spread := rewards[known].std()) > 0:
        advantages = advantages / spread
    return advantages


def zero_std_fraction(rewards: Tensor, groups: Tensor) -> float:
    """Share of the groups whose rewards are all equal and that therefore teach nothing."""
    ids = groups.unique().tolist()
    equal = sum(bool((r := rewards[(groups == g) & ~rewards.isnan()]).numel() < 2 or r.min() == r.max()) for g in ids)
    return equal / max(1, len(ids))
