"""What happens around a training step."""

from qerl_pl.callbacks.adapter import AdapterFolder
from qerl_pl.callbacks.check import StartCheck
from qerl_pl.callbacks.completions import CompletionsTable
from qerl_pl.callbacks.noise import AdaptiveQuantizationNoise
from qerl_pl.callbacks.progress import PhaseProgressBar
from qerl_pl.callbacks.results import EvaluationResults
from qerl_pl.callbacks.sync import AdapterSync
from qerl_pl.callbacks.tensorboard import OneScreen

__all__ = [
    "AdapterFolder",
    "AdapterSync",
    "AdaptiveQuantizationNoise",
    "CompletionsTable",
    "EvaluationResults",
    "OneScreen",
    "PhaseProgressBar",
    "StartCheck",
]
