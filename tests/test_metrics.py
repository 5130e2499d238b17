"""Metrics by hand."""

import math

import pytest
import torch

from qerl_pl.metrics import Averages, StepLog
from qerl_pl.rollouts import collate
from qerl_pl.types import Completion, Prompt


def test_averages_are_weighted_and_ignore_nan():
    averages = Averages()
    averages.add("a", 1.0, 3)
    averages.add("a", 5.0, 1)
    averages.add("a", float("nan"), 100)
    averages.add("rewards/format/mean", torch.tensor([1.0, 2.0]))
    result = averages.compute()
    assert result["a"].item() == 2.0
    assert result["rewards/format/mean"].item() == 1.5
    averages.add("a", 7.0)
    assert {k: v.item() for k, v in averages.compute().items()} == {"a": 7.0}


def test_step_log():
    completions = [Completion([4, 5, 6], [-1.0, -2.0, -3.0], "", True), Completion([7], [-0.5], "", False)]
    batch = collate([Prompt([1, 2], ""), Prompt([3], "")], completions)
    assert batch.tokens.tolist() == [[1, 2, 4, 5, 6], [3, 7, 0, 0, 0]]
    assert batch.completion_mask.tolist() == [[False, False, True, True, True], [False, True, False, False, False]]
    batch.rewards, batch.seconds = torch.tensor([1.0, 0.0]), {"rollout": 2.0, "reward": 0.5}
    log = StepLog()
    before = batch.sampler_logprobs + 0.5 * batch.completion_mask
    ratio = (0.5 * batch.completion_mask).exp()
    log.add(
        batch, before, torch.ones_like(before), {"policy/ratio": torch.tensor(1.0)}, batch.completion_mask, ratio, 1.2
    )
    metrics = {k: v.item() for k, v in log.finish(batch, 4.0, 1e-3).items()}
    assert metrics["sampling/logp_difference/mean"] == pytest.approx(0.5)
    assert metrics["sampling/logp_difference/max"] == pytest.approx(0.5)
    assert metrics["sampling/importance_ratio"] == pytest.approx(math.exp(0.5))
    assert metrics["sampling/capped_fraction"] == 1.0
    # k3 of the sampler's tokens: r − 1 − log r with r = trainer / sampler
    assert metrics["sampling/kl"] == pytest.approx(math.exp(0.5) - 1 - 0.5)
    assert metrics["tokens_per_second/rollout"] == 2.0  # four tokens in two seconds
    assert metrics["tokens_per_second/update"] == 7 / 4
    assert metrics["completions/clipped_ratio"] == 0.5
    assert metrics["completions/mean_length"] == 2.0
    assert metrics["reward"] == 0.5
    assert metrics["step_time/update"] == 4.0
