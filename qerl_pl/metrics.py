"""Metrics that are reduced over ranks."""

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from qerl_pl.losses import k3
from qerl_pl.types import RolloutBatch


class Averages(nn.Module):
    """Weighted means by name, made as they are first met. A NaN is left out, not spread."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: Any = nn.ModuleDict()

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


class StepLog(nn.Module):
    """All that is logged of one training step."""

    def __init__(self) -> None:
        super().__init__()
        self.averages = Averages()
        self.peak_difference = 0.0

    def add(
        self,
        part: RolloutBatch,
        before: Tensor,  # [B, T]: the trainer's log-probabilities before the update
        entropy: Tensor,  # [B, T]
        metrics: dict[str, Tensor],  # of the loss
        mask: Tensor,  # [B, T]
        ratio: Tensor,  # [B, T]: importance_ratio
        cap: float | None,  # of the importance weights
    ) -> None:
        """Token means of one micro-batch."""
        count = mask.sum()
        if count == 0:
            return
        difference = (before - part.sampler_logprobs)[mask]
        metrics = metrics | {
            "entropy": entropy[mask].mean(),
            "sampling/logp_difference/mean": difference.abs().mean(),
            "sampling/kl": k3(before, part.sampler_logprobs, mask)[mask].mean(),
            "sampling/importance_ratio": ratio[mask].mean(),
        }
        if cap is not None:
            metrics["sampling/capped_fraction"] = (ratio[mask] > cap).float().mean()
        for name, value in metrics.items():
            self.averages.add(name, value, count)
        self.peak_difference = max(self.peak_difference, float(difference.abs().max()))

    def finish(self, batch: RolloutBatch, seconds: float, learning_rate: float) -> dict[str, Tensor]:
        """Everything under its name; ``seconds`` is the time of the update. The next step starts from nothing."""
        metrics: dict[str, Any] = self.averages.compute() | batch.summary()
        metrics |= {f"step_time/{phase}": value for phase, value in batch.seconds.items()}
        metrics |= {
            "sampling/logp_difference/max": self.peak_difference,
            "step_time/update": seconds,
            "tokens_per_second/rollout": int(batch.completion_mask.sum()) / batch.seconds["rollout"],
            "tokens_per_second/update": int(batch.lengths.sum()) / seconds,
            "learning_rate": learning_rate,
        }
        self.peak_difference = 0.0
        return {name: torch.as_tensor(value, dtype=torch.float32) for name, value in metrics.items()}
