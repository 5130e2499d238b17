"""Sampling engines behind one interface."""

from qerl_pl.engine.base import ENGINES, CannotShareError, Engine, EngineName, EngineSpec, Progress
from qerl_pl.engine.transformers import TransformersEngine
from qerl_pl.engine.vllm import VLLMEngine

__all__ = [
    "ENGINES",
    "CannotShareError",
    "Engine",
    "EngineName",
    "EngineSpec",
    "Progress",
    "TransformersEngine",
    "VLLMEngine",
]
