"""Metrics that are reduced over ranks."""

import math

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.utilities import dim_zero_cat


class Averages(nn.Module):
    """Weighted means by name, made as they are first met. A NaN is left out, not spread."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = nn.ModuleDict()

    def add(self, name: str, value: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Take in a value (or a tensor of them), each with ``weight``."""
        value = torch.as_tensor(value)
        if name not in self.metrics:
            self.metrics[name] = MeanMetric(nan_strategy="ignore").to(value.device)
        self.metrics[name].update(value, weight)

    def compute(self) -> dict[str, Tensor]:
        """All means over all ranks; starts again from nothing."""
        result = {name: metric.compute() for name, metric in self.metrics.items() if metric.update_called}
        for metric in self.metrics.values():
            metric.reset()
        return result


class PassRate(Metric):
    """Mean pass@1 over problems, with a 95 % interval.

    Each problem counts once, with the mean over its samples. The spread of those means holds both sources of chance,
    which problems were drawn and which answers were sampled, so the interval is 1.96 standard errors of their mean.
    """

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("means", default=[], dist_reduce_fx="cat")

    def update(self, right: Tensor) -> None:
        """right [problems, samples], 0 or 1."""
        self.means.append(right.float().mean(-1))

    def compute(self) -> tuple[Tensor, Tensor]:
        """(pass@1, half width of its 95 % interval); NaN width for a single problem."""
        means = dim_zero_cat(self.means)
        return means.mean(), 1.96 * means.std() / math.sqrt(len(means))
