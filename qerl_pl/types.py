"""Records that flow through a training step: Prompt -> Completion -> RolloutBatch."""

from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from qerl_pl.advantages import zero_std_fraction


@dataclass(frozen=True)
class Prompt:
    """One problem, ready for an engine."""

    token_ids: list[int]
    text: str  # the rendered chat, for people
    columns: dict[str, Any] = field(default_factory=dict)  # the other columns of its row: what rewards read


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn."""

    n: int = 1  # completions a prompt
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Completion:
    """What an engine returns for one sample."""

    token_ids: list[int]  # with the end token, if it was reached
    logprobs: list[float]  # of each sampled token, under the distribution it was drawn from
    text: str
    finished: bool  # False: cut off by max_tokens


@dataclass
class RolloutBatch:
    """B completions with all that the loss needs. Rows of one group are adjacent. T is the longest prompt +
    completion.
    """

    tokens: Tensor  # [B, T] int64: prompt, completion, padding on the right
    lengths: Tensor  # [B] int64: prompt + completion
    completion_mask: Tensor  # [B, T] bool: True on completion tokens
    sampler_logprobs: Tensor  # [B, T] float32: the engine's, at completion tokens; 0 elsewhere
    rewards: Tensor  # [B] float32: weighted sum; NaN where every reward abstained
    reward_parts: dict[str, Tensor]  # name -> [B] float32, NaN where the verifier abstained
    advantages: Tensor  # [B] float32
    groups: Tensor  # [B] int64: which prompt a row answers
    finished: Tensor  # [B] bool
    prompts: list[Prompt]  # one a row
    completions: list[Completion]
    step: int = 0  # index of this rollout in the run
    temperature: float = 1.0  # that it was sampled with
    source: str = ""  # name of the evaluation set
    seconds: dict[str, float] = field(default_factory=dict)  # phase -> wall time
    notes: dict[str, float] = field(default_factory=dict)  # further numbers to log, by name

    def to(self, device: Any) -> "RolloutBatch":
        """The same batch with its tensors on ``device``; Lightning calls this."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in moved.items():
            if isinstance(value, Tensor):
                moved[name] = value.to(device)
        moved["reward_parts"] = {k: v.to(device) for k, v in self.reward_parts.items()}
        return RolloutBatch(**moved)

    def rows(self, index: Tensor) -> "RolloutBatch":
        """Some of the completions, padded no further than the longest of them."""
        width = int(self.lengths[index].max())
        positions = index.tolist()
        return RolloutBatch(
            tokens=self.tokens[index, :width],
            lengths=self.lengths[index],
            completion_mask=self.completion_mask[index, :width],
            sampler_logprobs=self.sampler_logprobs[index, :width],
            rewards=self.rewards[index],
            reward_parts={k: v[index] for k, v in self.reward_parts.items()},
            advantages=self.advantages[index],
            groups=self.groups[index],
            finished=self.finished[index],
            prompts=[self.prompts[i] for i in positions],
            completions=[self.completions[i] for i in positions],
            step=self.step,
            temperature=self.temperature,
            source=self.source,
        )

    def summary(self) -> dict[str, float]:
        """What a reader wants to know of the batch as a whole."""
        lengths = self.completion_mask.sum(-1).float()
        known = self.rewards[~self.rewards.isnan()]
        parts = {f"rewards/{k}/mean": float(v.nanmean()) for k, v in self.reward_parts.items()}
        parts |= self.notes
        return parts | {
            "reward": float(known.mean()) if len(known) else float("nan"),
            "reward_std": float(known.std()) if len(known) > 1 else 0.0,
            "frac_reward_zero_std": zero_std_fraction(self.rewards, self.groups),
            "completions/mean_length": float(lengths.mean()),
            "completions/max_length": float(lengths.max()),
            "completions/clipped_ratio": 1 - float(self.finished.float().mean()),
        }

    def __len__(self) -> int:
        return len(self.lengths)
