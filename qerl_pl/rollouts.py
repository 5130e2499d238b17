"""prompts -> engine -> rewards -> advantages -> RolloutBatch."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_pl.advantages import group_advantages
from qerl_pl.engine.base import Engine
from qerl_pl.prompts import Prompts, batch_indices
from qerl_pl.rewards import score
from qerl_pl.seeds import derive_seed
from qerl_pl.types import Completion, Prompt, RolloutBatch, Sampling
from registry.rewards import AnswerFormat, Reward

Report = Callable[[str, str], None]
"""Told of the phase a run is in (rollout, reward, update, ...) and of how it goes."""


@dataclass
class Collector:
    """Samples and scores completions of given prompts."""

    engine: Engine
    rewards: Sequence[Reward]
    answer_format: AnswerFormat
    scale_rewards: str = "group"
    report: Report = lambda phase, text: None

    def rollout(
        self, prompts: Sequence[Prompt], sampling: Sampling, seeds: Sequence[int], step: int = 0
    ) -> RolloutBatch:
        """``sampling.n`` completions of each prompt, as one batch with rewards and advantages."""
        started = time.perf_counter()
        groups = self.engine.generate([p.token_ids for p in prompts], sampling, seeds, self._progress)
        sampled = time.perf_counter()
        completions = [c for group in groups for c in group]
        repeated = [p for p in prompts for _ in range(sampling.n)]
        self.report("reward", f"{len(completions)} completions")
        parts, totals = score(self.rewards, self.answer_format, repeated, completions)
        batch = collate(repeated, completions)
        batch.groups = torch.arange(len(prompts)).repeat_interleave(sampling.n)
        batch.rewards = torch.tensor(totals, dtype=torch.float32)
        nan = float("nan")
        batch.reward_parts = {k: torch.tensor([nan if v is None else v for v in values]) for k, values in parts.items()}
        batch.advantages = group_advantages(batch.rewards, batch.groups, self.scale_rewards)
        batch.step, batch.temperature = step, sampling.temperature
        batch.seconds = {"rollout": sampled - started, "reward": time.perf_counter() - sampled}
        return batch

    def _progress(self, done: int, total: int, rate: float) -> None:
        self.report("rollout", f"{done}/{total} completions, {rate:,.0f} tok/s")


def collate(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> RolloutBatch:
    """Tokens, masks and sampled log-probabilities of completions, padded on the right; rewards and advantages still
    to be filled in.
    """
    size = len(completions)
    lengths = torch.tensor([len(p.token_ids) + len(c.token_ids) for p, c in zip(prompts, completions, strict=True)])
    tokens = torch.zeros(size, int(lengths.max()), dtype=torch.long)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    logprobs = torch.zeros(tokens.shape)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, end = len(prompt.token_ids), int(lengths[row])
        tokens[row, :end] = torch.tensor(prompt.token_ids + completion.token_ids)
        mask[row, start:end] = True
        logprobs[row, start:end] = torch.tensor(completion.logprobs)
    zeros: Tensor = torch.zeros(size)
    return RolloutBatch(
        tokens, lengths, mask, logprobs, rewards=zeros, reward_parts={}, advantages=zeros, groups=torch.arange(size),
        finished=torch.tensor([c.finished for c in completions]), prompts=list(prompts), completions=list(completions),
    )  # fmt: skip


class TrainingRollouts:
    """An epoch of rollout batches, each sampled when it is asked for.

    It is sized, so that Lightning does not fetch a batch ahead of the update before it. ``step`` counts the batches
    of the whole run.
    """

    def __init__(
        self,
        collector: Collector,
        prompts: Prompts,
        batch: int,
        sampling: Sampling,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if len(prompts) < batch:
            raise ValueError(f"prompts_per_batch: {batch} is more than the {len(prompts)} training prompts; lower it")
        self.collector, self.prompts, self.batch, self.sampling, self.seed = collector, prompts, batch, sampling, seed
        self.rank, self.world = rank, world
        self.step = 0

    def __len__(self) -> int:
        return len(self.prompts) // self.batch

    def __iter__(self) -> Iterator[RolloutBatch]:
        while True:
            indices = batch_indices(self.step, len(self.prompts), self.batch, self.seed)[self.rank :: self.world]
            seeds = [derive_seed(self.seed, "train", self.step, i) for i in indices]
            rollout = self.collector.rollout([self.prompts[i] for i in indices], self.sampling, seeds, self.step)
            self.step += 1
            yield rollout
            if self.step % len(self) == 0:
                return


class EvaluationRollouts:
    """Every prompt of every set once, ``sampling.n`` completions each, in order; the same seeds at every evaluation."""

    def __init__(
        self,
        collector: Collector,
        sets: Mapping[str, Prompts],  # by name; '' has none
        batch: int,
        sampling: Sampling,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.collector, self.sets, self.batch, self.sampling, self.seed = collector, sets, batch, sampling, seed
        self.rank, self.world = rank, world

    def _batches(self) -> Iterator[tuple[str, range]]:
        for name, prompts in self.sets.items():
            indices = range(self.rank, len(prompts), self.world)
            yield from ((name, indices[start : start + self.batch]) for start in range(0, len(indices), self.batch))

    def __len__(self) -> int:
        return sum(1 for _ in self._batches())

    def __iter__(self) -> Iterator[RolloutBatch]:
        for name, indices in self._batches():
            seeds = [derive_seed(self.seed, "evaluate", *([name] if name else []), i) for i in indices]
            batch = self.collector.rollout([self.sets[name][i] for i in indices], self.sampling, seeds)
            batch.source = name
            yield batch
