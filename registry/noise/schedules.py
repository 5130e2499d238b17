"""The noise schedules of the paper, and two to compare with. Below, t = (k - 1)/(K - 1) runs from 0 to 1."""

import math

from registry.noise.base import SCHEDULES, NoiseSchedule


@SCHEDULES.register("exponential")
class Exponential(NoiseSchedule):
    """σ_start · (σ_end/σ_start)^t (paper Eq. 8)."""

    def __init__(self, sigma_start: float = 1e-2, sigma_end: float = 5e-4, num_stages: int = 10) -> None:
        super().__init__(sigma_start, sigma_end, num_stages)
        if not (sigma_start > 0 and sigma_end > 0):
            raise ValueError(
                f"the exponential schedule needs sigma_start > 0 and sigma_end > 0, got {sigma_start} and {sigma_end}; "
                "use noise: linear to end at 0"
            )

    def level(self, k: int) -> float:
        return self.sigma_start * math.pow(self.sigma_end / self.sigma_start, (k - 1) / (self.num_stages - 1))


@SCHEDULES.register("linear")
class Linear(NoiseSchedule):
    """σ_start - (σ_start - σ_end) · t."""

    def level(self, k: int) -> float:
        return self.sigma_start - (self.sigma_start - self.sigma_end) * (k - 1) / (self.num_stages - 1)


@SCHEDULES.register("cosine")
class Cosine(NoiseSchedule):
    """σ_end + ½ (σ_start - σ_end) (1 + cos πt)."""

    def level(self, k: int) -> float:
        t = (k - 1) / (self.num_stages - 1)
        return self.sigma_end + (self.sigma_start - self.sigma_end) * (1 + math.cos(math.pi * t)) / 2


@SCHEDULES.register("logarithmic")
class Logarithmic(NoiseSchedule):
    """σ_start - (σ_start - σ_end) · log k / log K: fast at first, then slow."""

    def level(self, k: int) -> float:
        return self.sigma_start - (self.sigma_start - self.sigma_end) * math.log(k) / math.log(self.num_stages)


@SCHEDULES.register("constant")
class Constant(NoiseSchedule):
    """The same σ at every step, without a clean stage."""

    def __init__(self, sigma: float = 1e-2) -> None:
        super().__init__(sigma_start=sigma, sigma_end=sigma)
        if sigma == 0:
            raise ValueError("constant noise needs sigma > 0, got 0; use noise: none")

    def level(self, k: int) -> float:
        return self.sigma_start

    def sigma(self, step: int, total_steps: int) -> float:
        return self.sigma_start


@SCHEDULES.register("none")
class NoNoise(NoiseSchedule):
    """No noise but that of quantization (QeRL without AQN)."""

    def __init__(self) -> None:
        super().__init__(sigma_start=0.0, sigma_end=0.0)

    def level(self, k: int) -> float:
        return 0.0
