"""Group-relative advantages, by hand."""

import math

import pytest
import torch

from qerl_pl.advantages import group_advantages, zero_std_fraction


def test_by_hand():
    # Group 0: rewards 1, 0, 0, 0: mean 1/4, unbiased variance (9/16 + 3/16) / 3 = 1/4, std 1/2.
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 2.0, 4.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    root = 1 / math.sqrt(2)
    assert group_advantages(rewards, groups).tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5, -root, root])
    assert group_advantages(rewards, groups, "none").tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25, -1, 1])
    # std of 1, 0, 0, 0, 2, 4: mean 7/6, sum of squares 21 - 6 * 49/36 = 77/6, over 5
    std = math.sqrt(77 / 30)
    assert group_advantages(rewards, groups, "batch").tolist() == pytest.approx(
        [v / std for v in (0.75, -0.25, -0.25, -0.25, -1, 1)]
    )


def test_equal_rewards_give_zero_also_when_their_mean_is_rounded():
    rewards = torch.full((7,), 0.1)
    assert group_advantages(rewards, torch.zeros(7, dtype=torch.long)).tolist() == [0.0] * 7


def test_abstaining_rewards_are_left_out():
    nan = float("nan")
    rewards = torch.tensor([1.0, nan, 0.0, nan, nan, 5.0])
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    root = 1 / math.sqrt(2)
    assert group_advantages(rewards, groups).tolist() == pytest.approx([root, 0, -root, 0, 0, 0])
    assert group_advantages(rewards, groups, "batch").isfinite().all()


def test_order_of_rows_does_not_matter():
    torch.manual_seed(0)
    rewards, groups = torch.rand(24), torch.arange(24) % 6
    order = torch.randperm(24)
    torch.testing.assert_close(
        group_advantages(rewards, groups)[order], group_advantages(rewards[order], groups[order])
    )


def test_fraction_of_groups_without_spread():
    nan = float("nan")
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, nan, 2.0, nan, nan])
    assert zero_std_fraction(rewards, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])) == 0.75


def test_unknown_scale():
    with pytest.raises(ValueError, match="scale_rewards: 'groups' is not one of group, batch, none"):
        group_advantages(torch.zeros(2), torch.zeros(2), "groups")


def test_leave_one_out_by_hand():
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 3.0, 5.0]), torch.tensor([0, 0, 0, 1, 1])
    # 1 − 0, 0 − 1/2, 0 − 1/2; 3 − 5, 5 − 3
    assert group_advantages(rewards, groups, "none", "leave_one_out").tolist() == pytest.approx([1, -0.5, -0.5, -2, 2])
    with pytest.raises(ValueError, match="baseline: 'median' is not one of mean, leave_one_out"):
        group_advantages(rewards, groups, "none", "median")
