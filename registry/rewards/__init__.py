"""Rewards, and the answer formats that they read."""

from registry.rewards.answer_formats import (
    ANSWER_FORMATS,
    AnswerFormat,
    AnswerFormatName,
    Boxed,
    CodeBlock,
    Stated,
    ThinkAnswer,
    gold_answer,
)
from registry.rewards.base import REWARDS, VERDICTS, Reward, RewardName, Verdict, checked_scores
from registry.rewards.choice import Choice
from registry.rewards.code import Code
from registry.rewards.format import Format
from registry.rewards.gsm8k import GSM8K
from registry.rewards.length import Length
from registry.rewards.math import AnswerTag, Math
from registry.rewards.python import PythonReward
from registry.rewards.regex import Regex
from registry.rewards.verifier import Verifier

__all__ = [
    "ANSWER_FORMATS", "AnswerFormat", "AnswerFormatName", "AnswerTag", "Boxed", "Choice", "Code", "CodeBlock", "Format",
    "GSM8K", "Length", "Math", "PythonReward", "REWARDS", "Regex", "Reward", "RewardName", "Stated", "ThinkAnswer",
    "VERDICTS", "Verdict", "Verifier", "checked_scores", "gold_answer",
]  # fmt: skip
