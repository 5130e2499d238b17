"""Estimates by hand, against enumeration of every choice, and intervals against simulation."""

import itertools
import math
import random
from collections import Counter
from fractions import Fraction

import pytest

from qerl_pl.statistics import (
    Estimate,
    majority_at_k,
    mean_difference,
    mean_of_rates,
    mean_over_sets,
    pass_at_k,
    sign_test,
    t_quantile,
)


@pytest.mark.parametrize(
    ("df", "expected"),  # from printed tables
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423), (120, 1.9799), (1000, 1.9623)],
)
def test_t_quantile(df, expected):
    assert t_quantile(df) == pytest.approx(expected, abs=6e-5)


def test_t_quantile_has_no_seam():
    assert t_quantile(0) == math.inf
    assert 0 < t_quantile(200) - t_quantile(201) < 8e-5


def test_mean_of_rates_by_hand():
    # Means 1, 1/2, 0, 1/2 of two answers each: p = 1/2, s² = (1/4 + 1/4) / 3 = 1/6, so n_eff = 1/4 · 4 · 6 = 6.
    # Wilson with t² = 3.18245² = 10.12797 for 3 degrees of freedom: centre 1/2, half width
    # t √(p(1−p)/6 + t²/(4·36)) / (1 + t²/6) = 3.18245 · √(0.0416667 + 0.0703331) / 2.687995 = 0.39622.
    estimate = mean_of_rates([1, 0.5, 0, 0.5], 8)
    assert estimate.value == 0.5
    assert (estimate.low, estimate.high) == pytest.approx((0.5 - 0.39622, 0.5 + 0.39622), abs=1e-5)


def test_mean_of_rates_at_the_ends():
    # Thirty problems without a right answer: Wilson's upper end t² / (m + t²) with t = 2.04523.
    none = mean_of_rates([0.0] * 30, 30 * 16)
    assert (none.value, none.low) == (0, 0)
    assert none.high == pytest.approx(2.04523**2 / (30 + 2.04523**2), abs=1e-6)
    full = mean_of_rates([1.0] * 30, 30 * 16)
    assert (full.low, full.high) == pytest.approx((1 - none.high, 1.0))
    assert mean_of_rates([1.0], 16) == Estimate(1.0, 0.0, 1.0)


def test_answers_that_agree_count_once_and_spread_is_never_trusted_beyond_the_answers():
    same = mean_of_rates([1.0] * 10 + [0.0] * 20, 30 * 16)
    once = mean_of_rates([1.0] * 10 + [0.0] * 20, 30)
    assert same == once
    # All problems half right by chance: no spread at all; as precise as 30 · 2 answers, and no more.
    lucky = mean_of_rates([0.5] * 30, 60)
    t2 = t_quantile(29) ** 2
    assert (lucky.high - lucky.low) / 2 == pytest.approx(math.sqrt(t2 * (0.25 / 60 + t2 / 14400)) / (1 + t2 / 60))


def test_no_problems():
    with pytest.raises(ValueError, match="no problems"):
        mean_of_rates([], 1)


POPULATIONS = {  # of the chances of problems: draw, mean
    "half": (lambda rng: rng.random(), 0.5),
    "easy": (lambda rng: rng.betavariate(9, 1), 0.9),
    "known or not": (lambda rng: float(rng.random() < 0.3), 0.3),
    "equal": (lambda rng: 0.3, 0.3),
    "competition": (lambda rng: rng.betavariate(0.15, 0.85), 0.15),
}


@pytest.mark.parametrize("population", POPULATIONS)
@pytest.mark.parametrize(("m", "n"), [(15, 1), (15, 16), (30, 4), (30, 16), (200, 1), (200, 4)])
def test_interval_covers_the_mean(population, m, n):
    draw, mean = POPULATIONS[population]
    rng, covered, runs = random.Random(f"{population} {m} {n}"), 0, 300
    for _ in range(runs):
        chances = [draw(rng) for _ in range(m)]
        estimate = mean_of_rates([sum(rng.random() < p for _ in range(n)) / n for p in chances], m * n)
        covered += estimate.low <= mean <= estimate.high
    assert covered / runs >= 0.89  # the truth is 92.7 % at worst (competition, 15 problems), ± 1.5 % in 300 runs


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 0.5  # 1 − C(3,2)/C(4,2) = 1 − 3/6
    assert pass_at_k(4, 3, 2) == 1
    assert pass_at_k(5, 2, 3) == pytest.approx(0.9)  # 1 − 1/10
    assert pass_at_k(64, 0, 64) == 0
    for wrong in ((4, 5, 1), (4, 1, 5), (4, 1, 0), (4, -1, 1)):
        with pytest.raises(ValueError, match="k must be in"):
            pass_at_k(*wrong)


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_pass_at_k_is_the_mean_over_all_choices(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def first_of_the_most_frequent(order):
    votes = Counter(answer for answer, _ in order if answer is not None)
    best = max(votes.values(), default=0)
    return next((right for answer, right in order if votes[answer] == best and answer is not None), False)


@pytest.mark.parametrize(
    "answers",
    ["a", "aab", "abc", "aabb", "aabbc", "aabbcc", "a---b", "----", "abbb-a", "aaabbc"],
)  # fmt: skip
def test_majority_is_the_mean_over_all_orders(answers):
    answers = [None if a == "-" else a for a in answers]
    right = [a in ("a", "c") for a in answers]
    for k in range(1, len(answers) + 1):
        orders = list(itertools.permutations(zip(answers, right, strict=True), k))
        expected = Fraction(sum(first_of_the_most_frequent(order) for order in orders), len(orders))
        assert majority_at_k(answers, right, k) == pytest.approx(float(expected)), k


def test_majority_by_hand():
    assert majority_at_k([1, 1, 2], [True, True, False], 3) == 1
    assert majority_at_k([1, 2, 2], [True, False, False], 3) == 0
    assert majority_at_k([1, 2], [True, False], 2) == 0.5  # a tie
    assert majority_at_k([1, 2, 3, 3], [True, False, False, False], 1) == 0.25
    # Of the four choices of three from 1 1 2 3 two have both 1; 1 2 3 comes twice and is won by 1 in a third of cases.
    assert majority_at_k([1, 1, 2, 3], [True, True, False, False], 3) == pytest.approx((2 + 2 / 3) / 4)
    assert majority_at_k([1, 1, 1], [True, False, False], 3) == pytest.approx(1 / 3)  # judged both ways
    with pytest.raises(ValueError, match=r"majority@3 of 2 answers"):
        majority_at_k([1, 2], [True, False], 3)


def test_majority_of_many_answers_is_quick_and_right():
    rng = random.Random(0)
    answers = [rng.randrange(12) for _ in range(64)]
    right = [a == 3 for a in answers]
    exact = majority_at_k(answers, right, 32)
    drawn = 0
    for _ in range(4000):
        chosen = rng.sample(list(zip(answers, right, strict=True)), 32)
        drawn += first_of_the_most_frequent(chosen)
    assert exact == pytest.approx(drawn / 4000, abs=0.03)


def test_mean_over_sets():
    # Below: √(0.3² + 0.4²) / 2 = 0.25; above: √(0.06² + 0.08²) / 2 = 0.05.
    both = mean_over_sets([Estimate(0.5, 0.2, 0.56), Estimate(0.7, 0.3, 0.78)])
    assert (both.value, both.low, both.high) == pytest.approx((0.6, 0.35, 0.65))
    one = Estimate(0.5, 0.2, 0.9)
    alone = mean_over_sets([one])
    assert (alone.value, alone.low, alone.high) == pytest.approx((0.5, 0.2, 0.9))
    assert mean_over_sets([Estimate(-0.5, -1, 0)], lowest=-1).low == -1


def test_mean_difference_by_hand():
    # Bonett & Price for 10 problems, 3 better and 1 worse: centre 2/12, variance (6/12 − 4/144) / 12.
    estimate = mean_difference([1, 1, 1, -1, 0, 0, 0, 0, 0, 0], 1)
    half = 2.262157 * math.sqrt((0.5 - 4 / 144) / 12)
    assert estimate.value == pytest.approx(0.2)
    assert (estimate.low, estimate.high) == pytest.approx((2 / 12 - half, 2 / 12 + half), abs=1e-6)
    # Four samples: the made-up problems are ±1/2.
    equal = mean_difference([0.0] * 10, 4)
    assert (equal.low, equal.high) == pytest.approx((-(h := 2.262157 * math.sqrt(0.5 / 12 / 12)), h), abs=1e-6)
    assert mean_difference([0.5], 4) == Estimate(0.5, -1, 1)
    assert mean_difference([1.0] * 5, 1).high == 1
    with pytest.raises(ValueError, match="both must be at least 1"):
        mean_difference([], 1)


@pytest.mark.parametrize(("m", "n"), [(15, 1), (30, 4), (30, 16), (200, 1)])
@pytest.mark.parametrize("gain", [0.0, 0.15])
def test_interval_covers_the_difference(m, n, gain):
    """Problems of all difficulties, answered by two policies; the second is better by ``gain`` everywhere."""
    rng, covered, runs = random.Random(f"{m} {n} {gain}"), 0, 400
    for _ in range(runs):
        differences = []
        for _ in range(m):
            p = rng.random() * (1 - gain)
            one, other = (sum(rng.random() < q for _ in range(n)) for q in (p, p + gain))
            differences.append((other - one) / n)
        estimate = mean_difference(differences, n)
        covered += estimate.low <= gain <= estimate.high
    assert covered / runs >= 0.917


def test_sign_test_by_hand():
    assert sign_test(0, 0) == 1
    assert sign_test(5, 5) == 1
    assert sign_test(6, 0) == 2 / 64
    assert sign_test(1, 7) == 2 * (1 + 8) / 256  # (C(8,0) + C(8,1)) / 2⁸, twice
    assert sign_test(3000, 2000) < 1e-10
