"""Rollout batches with an engine that answers by a rule: what is sampled, kept, replaced and resumed."""

import io
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from qerl_pl.prompts import stream_index
from qerl_pl.rollouts import Collector, TrainingRollouts, say_notes
from qerl_pl.types import Completion, Prompt, Sampling
from registry.rewards import Boxed, PythonReward

PROMPTS = [Prompt([1, 2 + i], f"p{i}", {"number": i}) for i in range(10)]


class Engine:
    """Prompt i gets completions of which the first i mod 3 are right: of two, groups with i mod 3 = 1 have spread."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.seeds: list[int] = []

    def generate(self, prompts: Any, sampling: Sampling, seeds: Any, progress: Any = None) -> list[list[Completion]]:
        numbers = [p[1] - 2 for p in prompts]
        self.calls.append(numbers)
        self.seeds += list(seeds)
        return [
            [
                Completion([7] * (1 + k), [-1.0] * (1 + k), "yes" if k < n % 3 else "no", k == 0)
                for k in range(sampling.n)
            ]
            for n in numbers
        ]


def right(completions: list[str]) -> list[float]:
    return [float(text == "yes") for text in completions]


def loader(rounds: int = 1, batch: int = 4, prompts: list[Prompt] = PROMPTS, **collector: Any) -> TrainingRollouts:
    reward = PythonReward(function=f"{__name__}.right")
    made = Collector(Engine(), [reward], Boxed(), **collector)  # type: ignore[arg-type]
    return TrainingRollouts(made, prompts, batch, Sampling(2, 8), seed=0, rounds=rounds)  # type: ignore[arg-type]


def test_the_stream_is_one_permutation_after_another() -> None:
    stream = [stream_index(i, 10, 3) for i in range(30)]
    for epoch in range(3):
        assert sorted(stream[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert stream[:10] != stream[10:20] != stream[20:]
    assert [stream_index(i, 10, 4) for i in range(10)] != stream[:10]


def test_batches_take_the_stream_in_order() -> None:
    rollouts = loader()
    batches = [batch for _ in range(3) for batch in rollouts]
    assert len(batches) == 6 and rollouts.step == 6 and rollouts.cursor == 24
    taken = [number for call in rollouts.collector.engine.calls for number in call]
    assert taken == [stream_index(i, 10, 0) for i in range(24)]
    assert len(set(rollouts.collector.engine.seeds)) == 24  # a prompt that comes again is sampled anew
    assert [b.step for b in batches] == list(range(6))


def test_equal_groups_are_replaced() -> None:
    rollouts = loader(rounds=10)
    batch = next(iter(rollouts))
    numbers = [p.columns["number"] for p in batch.prompts]
    assert numbers[::2] == numbers[1::2] and all(n % 3 == 1 for n in numbers)
    assert batch.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    root = 0.5**0.5
    assert batch.advantages.tolist() == pytest.approx([root, -root] * 4)
    assert batch.rewards.tolist() == [1, 0] * 4
    calls = rollouts.collector.engine.calls
    taken = [number for call in calls for number in call]
    assert taken == [stream_index(i, 10, 0) for i in range(rollouts.cursor)]
    assert max(map(len, calls)) <= 4
    spread = [n for n in taken if n % 3 == 1]
    assert numbers[::2] == spread[:4]
    assert batch.notes["dynamic_sampling/acceptance"] == pytest.approx(len(spread) / len(taken))
    assert batch.notes["dynamic_sampling/rounds"] == len(calls)
    assert batch.notes["dynamic_sampling/filled_up"] == 0
    assert batch.summary()["dynamic_sampling/rounds"] == len(calls)
    assert batch.seconds["rollout"] > 0


def test_the_size_is_constant_when_too_few_are_found() -> None:
    rollouts = loader(rounds=2, prompts=[PROMPTS[i] for i in (0, 2, 3, 5, 6, 8, 9, 1)])  # one of eight has spread
    batch = next(iter(rollouts))
    assert len(batch) == 8 and batch.notes["dynamic_sampling/rounds"] == 2
    good = sum(n % 3 == 1 for n in (p.columns["number"] for p in batch.prompts[::2]))
    assert batch.notes["dynamic_sampling/filled_up"] == 4 - good
    assert Counter(batch.groups.tolist()) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_it_resumes_where_it_was() -> None:
    rollouts = loader(rounds=4)
    iterator = iter(rollouts)
    next(iterator)
    step, cursor = rollouts.step, rollouts.cursor
    expected = next(iterator)
    again = loader(rounds=4)
    again.step, again.cursor = step, cursor
    resumed = next(iter(again))
    assert torch.equal(resumed.tokens, expected.tokens) and resumed.step == expected.step
    assert again.cursor == rollouts.cursor


def test_truncated_completions_leave_the_baseline() -> None:
    """The second completion of each group is cut off, so nobody is left to compare the first with."""
    batch = next(iter(loader(truncated_in_baseline=False)))
    assert batch.advantages.tolist() == [0.0] * 8
    assert next(iter(loader())).advantages.abs().sum() > 0


def test_scale_of_the_whole_batch_after_joining() -> None:
    batch = next(iter(loader(rounds=10, scale_rewards="batch", baseline="leave_one_out")))
    assert batch.advantages.tolist() == pytest.approx(
        [1 / float(batch.rewards.std()), -1 / float(batch.rewards.std())] * 4
    )


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="max_sampling_rounds: 0 must be at least 1"):
        loader(rounds=0)
    with pytest.raises(ValueError, match="prompts_per_batch: 11 is more than the 10 training prompts"):
        loader(batch=11)


def test_a_note_stands_on_a_line_of_its_own(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    with Tqdm(total=4, desc="Training", ncols=60, file=sys.stdout):  # where Lightning's are
        say_notes("note", "one thing")
    written = terminal.getvalue()
    assert written.count("Training") >= 2  # the bar is drawn again
    (line,) = [line for line in written.split("\n") if "one thing" in line]
    assert line.rpartition("\r")[2] == "one thing"
