"""Schedules of adaptive quantization noise."""

from registry.noise.base import SCHEDULES, NoiseSchedule, ScheduleName
from registry.noise.schedules import Constant, Cosine, Exponential, Linear, Logarithmic, NoNoise

__all__ = [
    "SCHEDULES", "Constant", "Cosine", "Exponential", "Linear", "Logarithmic", "NoNoise", "NoiseSchedule",
    "ScheduleName",
]  # fmt: skip
