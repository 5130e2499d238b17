"""Where problems come from."""

from registry.prompts.arithmetic import Arithmetic
from registry.prompts.base import PROMPTS, PromptsName, PromptSource
from registry.prompts.dataset import File, Hub

__all__ = ["PROMPTS", "Arithmetic", "File", "Hub", "PromptSource", "PromptsName"]
