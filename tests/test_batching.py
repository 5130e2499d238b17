"""Micro-batches and minibatches."""

import pytest
import torch

from qerl_pl.batching import micro_batches, minibatches


def test_by_hand():
    lengths = torch.tensor([10, 30, 20, 5, 30])
    # 30 and 30 fill 60; then 20 + 10 + 5
    assert [part.tolist() for part in micro_batches(lengths, torch.arange(5), 60)] == [[1, 4], [2, 0, 3]]
    assert [part.tolist() for part in micro_batches(lengths, torch.arange(5), 65)] == [[1, 4], [2, 0, 3]]
    assert [part.tolist() for part in micro_batches(lengths, torch.arange(5), 80)] == [[1, 4, 2], [0, 3]]
    assert [part.tolist() for part in micro_batches(lengths, torch.tensor([3, 1]), 8)] == [[1], [3]]


def test_every_row_once_and_within_the_budget():
    lengths = torch.randint(1, 100, (200,), generator=torch.Generator().manual_seed(0))
    parts = micro_batches(lengths, torch.arange(200), 256)
    assert sorted(torch.cat(parts).tolist()) == list(range(200))
    assert all(int(lengths[p].sum()) <= 256 for p in parts)


def test_minibatches():
    assert [p.tolist() for p in minibatches(4, 1, 0)] == [[0, 1, 2, 3]]
    parts = minibatches(10, 3, 7)
    assert sorted(torch.cat(parts).tolist()) == list(range(10)) and sorted(map(len, parts)) == [3, 3, 4]
    assert torch.equal(torch.cat(parts), torch.cat(minibatches(10, 3, 7)))
    with pytest.raises(ValueError, match="num_minibatches: 5 is more than the 4 completions"):
        minibatches(4, 5, 0)
