"""Rewards, and the answer formats that they read."""

from registry.rewards.answer_formats import (
    ANSWER_FORMATS,
    AnswerFormat,
    AnswerFormatName,
    Boxed,
    ThinkAnswer,
    gold_answer,
)
from registry.rewards.base import REWARDS, Reward, RewardName, checked_scores
from registry.rewards.format import Format
from registry.rewards.gsm8k import GSM8K
from registry.rewards.python import PythonReward

__all__ = [
    "ANSWER_FORMATS", "GSM8K", "REWARDS", "AnswerFormat", "AnswerFormatName", "Boxed", "Format", "PythonReward",
    "Reward", "RewardName", "ThinkAnswer", "checked_scores", "gold_answer",
]  # fmt: skip
