"""The loss of a rollout batch over the policy: old scores, and gradients micro-batch by micro-batch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qerl_pl.batching import micro_batches
from qerl_pl.distributed import total
from qerl_pl.losses import (
    Loss,
    entropy_threshold,
    importance_ratio,
    importance_weights,
    policy_loss,
    token_weights,
)  # fmt: skip
from qerl_pl.metrics import StepLog
from qerl_pl.policy import Policy
from qerl_pl.types import RolloutBatch


@dataclass
class Scores:
    """What the loss needs beside the batch itself; all [B, T], and None where it does not need it."""

    old: Tensor | None = None  # log π_old
    entropy: Tensor | None = None  # of π_old
    reference: Tensor | None = None  # log-probabilities of the base


class Counter:
    """Says how many completions of a rollout batch are gone through, in one or more calls."""

    def __init__(self, report: Callable[[str, str], None] = lambda phase, text: None) -> None:
        self._report, self._phase, self._done, self._total = report, "", 0, 0

    def begin(self, phase: str, total: int) -> None:
        self._phase, self._done, self._total = phase, 0, total
        self._say()

    def add(self, completions: int) -> None:
        """What comes after the last one, as the proof of a sync, is not counted."""
        if self._done < self._total:
            self._done += completions
            self._say()

    def _say(self) -> None:
        if self._total:
            self._report(self._phase, f"{self._done}/{self._total} completions")


@dataclass
class Objective:
    """Computes with the policy; memory is bounded by ``budget`` tokens at a time."""

    policy: Policy
    settings: Loss
    budget: int
    max_length: int  # of a completion
    log: StepLog
    backward: Callable[[Tensor], None]
    counter: Counter = field(default_factory=Counter)

    def mask(self, batch: RolloutBatch) -> Tensor:  # [B, T]
        """Tokens that have a loss."""
        if self.settings.mask_truncated_completions:
            return batch.completion_mask & batch.finished.unsqueeze(-1)
        return batch.completion_mask

    def prepare(self, batch: RolloutBatch, updates: int) -> Scores:
        """Scores of the batch before its first update."""
        scores = Scores()
        old = updates > 1 or self.settings.top_entropy_quantile < 1  # at the first and only update π_old is π
        self.counter.begin("score", len(batch) * (old + bool(self.settings.beta)))
        if old:
            scores.old, scores.entropy = self.score(batch)
        if self.settings.beta:
            scores.reference, _ = self.score(batch, adapter=False)
        self.counter.begin("update", len(batch) * self.settings.num_iterations)
        return scores

    @torch.no_grad()
    def score(self, batch: RolloutBatch, adapter: bool = True) -> tuple[Tensor, Tensor]:
        """log π(token) and entropy at completion tokens [B, T], 0 elsewhere."""
        logprobs, entropy = (torch.zeros_like(batch.sampler_logprobs) for _ in range(2))
        for micro in self._micro_batches(batch, torch.arange(len(batch))):
            part = batch.rows(micro)
            scores = self.policy(part.tokens, part.lengths, part.completion_mask, part.temperature, adapter)
            for out, values in zip((logprobs, entropy), scores, strict=True):
                out[micro, : values.shape[1]] = values
        return logprobs, entropy

    def accumulate(self, batch: RolloutBatch, rows: Tensor, scores: Scores) -> Tensor:
        """Add the gradient of the loss over ``rows`` of the batch to the policy's; the loss."""
        settings, mask = self.settings, self.mask(batch)
        counted = mask[rows]
        focus = None  # [B, T]: where the policy's gradient comes from
        if settings.top_entropy_quantile < 1:
            assert scores.entropy is not None
            threshold = entropy_threshold(scores.entropy[rows], counted, settings.top_entropy_quantile)
            focus = mask & (scores.entropy >= threshold)
        counts = len(rows), int(counted.sum()), int(counted.sum() if focus is None else focus[rows].sum())
        completions, tokens, focused = total(counts, batch.tokens.device)
        sum_of_losses = torch.zeros((), device=batch.tokens.device)
        # Without KL and entropy a completion whose advantage is 0 has no gradient: it is measured, not differentiated.
        learn = (batch.advantages[rows] != 0) | bool(settings.beta or settings.entropy_coef)
        for part_rows, with_grad in ((rows[learn], True), (rows[~learn], False)):
            for micro in self._micro_batches(batch, part_rows):
                part = batch.rows(micro)
                with torch.set_grad_enabled(with_grad):
                    logprobs, entropy = self.policy(
                        part.tokens, part.lengths, part.completion_mask, part.temperature,
                        entropy_grad=settings.entropy_coef != 0,
                    )  # fmt: skip
                width = logprobs.shape[1]
                before = logprobs.detach() if scores.old is None else scores.old[micro, :width]
                keep = mask[micro, :width]
                where = None if focus is None else focus[micro, :width]
                ratio = importance_ratio(before, part.sampler_logprobs, keep, settings.importance_level)
                loss, metrics = policy_loss(
                    settings, logprobs, before, part.advantages, keep,
                    token_weights(keep, settings.loss_type, completions, tokens, self.max_length),
                    importance_weights(ratio, settings.importance_cap, settings.importance_mode),
                    None if scores.reference is None else scores.reference[micro, :width],
                    where,
                )  # fmt: skip
                if settings.entropy_coef:
                    bonus = entropy[keep if where is None else where].sum() / max(focused, 1.0)
                    loss = loss - settings.entropy_coef * bonus
                if with_grad:
                    self.backward(loss)
                sum_of_losses += loss.detach()
                self.log.add(part, before, entropy.detach(), metrics, keep, ratio, settings.importance_cap)
        return sum_of_losses

    def _micro_batches(self, batch: RolloutBatch, rows: Tensor) -> Iterator[Tensor]:
        for micro in micro_batches(batch.lengths.cpu(), rows.cpu(), self.budget):
            yield micro.to(batch.tokens.device)
            self.counter.add(len(micro))
