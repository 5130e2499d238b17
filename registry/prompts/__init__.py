"""Where problems come from."""

from registry.prompts.arithmetic import Arithmetic
from registry.prompts.base import PROMPTS, PromptsName, PromptSource
from registry.prompts.concat import Concat
from registry.prompts.dataset import File, Hub
from registry.prompts.presets import (
    AIME24,
    AIME25,
    AMC23,
    BigMath,
    DapoMath,
    GSM8KProblems,
    Math500,
    MathProblems,
    Preset,
)

__all__ = [
    "AIME24", "AIME25", "AMC23", "PROMPTS", "Arithmetic", "BigMath", "Concat", "DapoMath", "File", "GSM8KProblems",
    "Hub", "Math500", "MathProblems", "Preset", "PromptSource", "PromptsName",
]  # fmt: skip
