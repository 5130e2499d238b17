"""prompts -> engine -> rewards -> advantages -> RolloutBatch."""

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from qerl_pl.advantages import group_advantages
from qerl_pl.engine.base import Engine
from qerl_pl.prompts import Prompts, stream_index
from qerl_pl.rewards import score, verdict_rates
from qerl_pl.seeds import derive_seed
from qerl_pl.types import Completion, Prompt, RolloutBatch, Sampling
from registry.rewards import AnswerFormat, Reward

Report = Callable[[str, str], None]
"""Told of the phase a run is in (rollout, reward, update, ...) and of how it goes."""


def say_notes(phase: str, text: str) -> None:
    """Prints what a user should know, and nothing of the progress."""
    if phase == "note":
        tqdm.write(text, file=sys.stderr)  # a plain print would stand behind a progress bar


@dataclass
class Collector:
    """Samples and scores completions of given prompts."""

    engine: Engine
    rewards: Sequence[Reward]
    answer_format: AnswerFormat
    scale_rewards: str = "group"
    baseline: str = "mean"
    truncated_in_baseline: bool = True
    report: Report = say_notes

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
        batch.notes = {f"rewards/{name}": rate for name, rate in verdict_rates(self.rewards).items()}
        batch.advantages = self._advantages(batch)
        batch.step, batch.temperature = step, sampling.temperature
        batch.seconds = {"rollout": sampled - started, "reward": time.perf_counter() - sampled}
        return batch

    def _advantages(self, batch: RolloutBatch) -> Tensor:
        rewards = batch.rewards
        if not self.truncated_in_baseline:
            rewards = torch.where(batch.finished, rewards, torch.nan)
        return group_advantages(rewards, batch.groups, self.scale_rewards, self.baseline)

    def join(self, parts: Sequence[RolloutBatch]) -> RolloutBatch:
        """One batch of whole groups from several; advantages are made anew, as their scale may be the batch's."""
        batch = collate([p for part in parts for p in part.prompts], [c for part in parts for c in part.completions])
        batch.rewards = torch.cat([part.rewards for part in parts])
        names = list(dict.fromkeys(name for part in parts for name in part.reward_parts))
        batch.reward_parts = {name: torch.cat([part.reward_parts[name] for part in parts]) for name in names}
        shifts = [0, *itertools.accumulate(int(part.groups.max()) + 1 for part in parts)]
        groups = torch.cat([part.groups + shift for part, shift in zip(parts, shifts, strict=False)])
        batch.groups = groups.unique(return_inverse=True)[1]
        batch.advantages = self._advantages(batch)
        batch.step, batch.temperature = parts[0].step, parts[0].temperature
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

    It is sized, so that Lightning does not fetch a batch ahead of the update before it. Prompts come from an endless
    stream, one permutation after another; ``step`` counts the batches of the whole run and ``cursor`` the prompts that
    they took from it.

    With ``rounds`` above 1 groups whose rewards are all equal are replaced by others, which are sampled in at most so
    many rounds (DAPO's dynamic sampling). If too few have been found by then, some equal ones fill the batch up: its
    size is constant.
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
        rounds: int = 1,
    ) -> None:
        if len(prompts) < batch:
            raise ValueError(f"prompts_per_batch: {batch} is more than the {len(prompts)} training prompts; lower it")
        if rounds < 1:
            raise ValueError(f"max_sampling_rounds: {rounds} must be at least 1; 1 replaces nothing")
        self.collector, self.prompts, self.batch, self.sampling, self.seed = collector, prompts, batch, sampling, seed
        self.rank, self.world, self.rounds = rank, world, rounds
        self.step = self.cursor = 0

    def __len__(self) -> int:
        return len(self.prompts) // self.batch

    def __iter__(self) -> Iterator[RolloutBatch]:
        while True:
            rollout, cursor = self._batch(self.batch // self.world)
            self.step, self.cursor = self.step + 1, cursor
            yield rollout
            if self.step % len(self) == 0:
                return

    def _batch(self, size: int) -> tuple[RolloutBatch, int]:
        """A batch of ``size`` groups of this rank, and where the stream goes on after it."""
        cursor, sampled, missing = self.cursor, 0, size
        if self.rounds == 1:
            return self._rollout(cursor, size), cursor + size * self.world
        # Each with its groups that are used, and those that are equal.
        rounds: list[tuple[RolloutBatch, Tensor, Tensor]] = []
        while missing and len(rounds) < self.rounds:
            share = (size - missing) / sampled if sampled else 1.0  # of the groups so far that were good
            ask = min(size, math.ceil(missing / max(share, 0.25)))
            rollout = self._rollout(cursor, ask)
            cursor, sampled = cursor + ask * self.world, sampled + ask
            good = spread_groups(rollout)
            used = good.nonzero().flatten()[:missing]
            rounds.append((rollout, used, (~good).nonzero().flatten()))
            missing -= len(used)
        filled, parts = missing, []
        for rollout, used, equal in rounds:
            fill = equal[:missing]
            missing -= len(fill)
            if len(chosen := torch.cat([used, fill])):
                parts.append(rollout.rows(torch.isin(rollout.groups, chosen).nonzero().flatten()))
        batch = self.collector.join(parts)
        for phase in rounds[0][0].seconds:  # what was dropped took time too
            batch.seconds[phase] = sum(rollout.seconds[phase] for rollout, _, _ in rounds)
        completions = sum(len(rollout) for rollout, _, _ in rounds)
        batch.notes = {  # verdicts of all that was sampled
            name: sum(rollout.notes[name] * len(rollout) for rollout, _, _ in rounds) / completions
            for name in rounds[0][0].notes
        }
        batch.notes |= {
            "dynamic_sampling/acceptance": sum(len(r.groups.unique()) - len(equal) for r, _, equal in rounds) / sampled,
            "dynamic_sampling/rounds": float(len(rounds)),
            "dynamic_sampling/filled_up": float(filled),
        }
        return batch, cursor

    def _rollout(self, cursor: int, size: int) -> RolloutBatch:
        positions = [cursor + self.rank + i * self.world for i in range(size)]
        seeds = [derive_seed(self.seed, "train", position) for position in positions]
        prompts = [self.prompts[stream_index(p, len(self.prompts), self.seed)] for p in positions]
        return self.collector.rollout(prompts, self.sampling, seeds, self.step)


def spread_groups(batch: RolloutBatch) -> Tensor:
    """[groups]: whether the advantages of a group differ, so that it teaches something."""
    flags = torch.zeros(int(batch.groups.max()) + 1, dtype=torch.bool)
    flags[batch.groups[batch.advantages != 0]] = True
    return flags


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
