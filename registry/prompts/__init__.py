"""Where problems come from."""

from registry.prompts.arithmetic import Arithmetic
from registry.prompts.base import PROMPTS, PromptsName, PromptSource

__all__ = ["PROMPTS", "Arithmetic", "PromptSource", "PromptsName"]
