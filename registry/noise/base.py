"""The interface of a noise schedule."""

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Never

from registry._registry import Name, Registry


class NoiseSchedule(ABC):
    """The noise level σ over a run: K + 1 equal stages, a clean one and then K levels (paper §3.4, Algorithm of AQN).

    Stage 0 has σ = 0, so that only the static quantization noise acts; stages 1..K have ``level(1)`` .. ``level(K)``.
    The paper itself cuts the run into K stages and so never reaches ``sigma_end``; here the last stage does, in runs of
    at least K + 1 steps.
    """

    def __init__(self, sigma_start: float = 1e-2, sigma_end: float = 5e-4, num_stages: int = 10) -> None:
        for name, sigma in (("sigma_start", sigma_start), ("sigma_end", sigma_end)):
            if not 0 <= sigma < math.inf:
                raise ValueError(
                    f"{name} must be a finite number of at least 0, got {sigma}; it is a standard deviation"
                )
        if num_stages < 2:
            raise ValueError(f"num_stages must be at least 2, got {num_stages}; for one level use noise: constant")
        self.sigma_start, self.sigma_end, self.num_stages = sigma_start, sigma_end, num_stages

    @abstractmethod
    def level(self, k: int) -> float:
        """σ of stage ``k`` = 1..K."""

    def sigma(self, step: int, total_steps: int) -> float:
        """σ at ``step`` = 0..total_steps-1. A run that goes on after its end stays in the last stage."""
        if step < 0 or total_steps < 1:
            raise ValueError(
                f"step must be >= 0 and total_steps >= 1, got {step} and {total_steps}; set trainer.max_steps"
            )
        stage = min(step * (self.num_stages + 1) // total_steps, self.num_stages)
        return self.level(stage) if stage else 0.0


SCHEDULES: Registry[NoiseSchedule] = Registry("noise schedule", "qerl_pl.noise")

if TYPE_CHECKING:
    ScheduleName = Never
else:

    class ScheduleName(Name, registry=SCHEDULES):
        """A registered noise schedule."""
