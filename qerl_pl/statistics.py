"""What can be said of a policy from right and wrong answers: estimates with 95 % intervals.

A problem i of m has n answers, of which c are right. Problems are a sample of all problems, answers a sample of all
answers; every interval here holds both kinds of chance, because it is made from the spread between problems.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean, variance

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A value with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


@cache
def t_quantile(df: int) -> float:
    """The two-sided 95 % quantile of Student's t; ∞ for 0 degrees of freedom.

    Up to 200 degrees the distribution function (Abramowitz & Stegun 26.7.3 and 26.7.4) is inverted by bisection,
    beyond them the expansion 26.7.5 is exact to 1e-9.
    """
    if df < 1:
        return math.inf
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    if df > 200:
        return (
            z
            + (z**3 + z) / (4 * df)
            + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
        )
    low, high = 0.0, math.pi / 2  # of the angle arctan(t/√df)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_mass(middle, df) < CONFIDENCE else (low, middle)
    return math.tan(low) * math.sqrt(df)


def _t_mass(angle: float, df: int) -> float:
    """P(|T| < √df · tan(angle))."""
    odd = df % 2
    cos2 = math.cos(angle) ** 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, df, 2):  # powers of the cosine: k - 1
        total += term
        term *= cos2 * k / (k + 1)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def mean_of_rates(rates: Sequence[float], most: float) -> Estimate:
    """The mean over problems of rates in [0, 1], with Wilson's interval at the effective sample size.

    The standard error of the mean s/√m says how many independent yes-or-no answers would be as precise:
    n_eff = p(1 − p) m / s². It is at least m − 1 for rates in [0, 1], and by chance alone more than ``most`` (m·n for
    pass@1, as many as there are answers). Wilson's score interval for n_eff answers, with the t quantile of m − 1
    degrees of freedom, stays within [0, 1] and has a width at 0 and 1 (there, where no spread is seen, n_eff = m: the
    answers to a problem may all be one). One problem says nothing of others: [0, 1]. Korn & Graubard 1998; Dean &
    Pagano, J. Surv. Stat. Methodol. 3 (2015) 484, who compare such intervals for clustered samples.
    """
    m = len(rates)
    if not m:
        raise ValueError("there are no problems to average over")
    p = fmean(rates)
    t2 = t_quantile(m - 1) ** 2
    if math.isinf(t2):
        return Estimate(p, 0.0, 1.0)
    spread = variance(rates)
    size = most if 0 < p < 1 else float(m)
    if spread > 0:
        size = min(p * (1 - p) * m / spread, most)
    center = (p + t2 / (2 * size)) / (1 + t2 / size)
    half = math.sqrt(t2 * (p * (1 - p) / size + t2 / (4 * size**2))) / (1 + t2 / size)
    return Estimate(p, min(p, max(0.0, center - half)), max(p, min(1.0, center + half)))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k of the n answers is right, c of them being right: 1 − C(n−c, k) / C(n, k).

    Unbiased for the chance that k new answers hold a right one (Chen et al., arXiv 2107.03374, Eq. 1).
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {n} answers with {c} right: k must be in 1..n and c in 0..n")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def majority_at_k(answers: Sequence[Hashable | None], right: Sequence[bool], k: int) -> float:
    """Chance that the most frequent answer among k of the n answers is right, over all C(n, k) choices.

    ``answers`` are compared by equality; None gives no vote, and k answers without a vote are wrong. Of several most
    frequent answers the first one given counts; as the order of answers is chance, each of them is equally likely.
    An answer that was judged both ways counts by the share of its right verdicts.
    """
    n = len(answers)
    if len(right) != n or not 1 <= k <= n:
        raise ValueError(f"majority@{k} of {n} answers with {len(right)} verdicts: k must be in 1..n")
    votes = Counter(a for a in answers if a is not None)
    silent = n - votes.total()
    total = 0.0
    for answer, count in votes.items():
        share = fmean(r for a, r in zip(answers, right, strict=True) if a == answer)
        others = [c for a, c in votes.items() if a != answer]
        if share:
            wins = (math.comb(count, f) * _ways(others, silent, f, k - f) for f in range(1, min(count, k) + 1))
            total += share * sum(wins)
    return total / math.comb(n, k)


def _ways(others: Sequence[int], silent: int, most: int, size: int) -> float:
    """Choices of ``size`` answers in which no other has more than ``most`` votes; t that have as many weigh 1/(t+1)."""
    ways: dict[tuple[int, int], int] = {(0, 0): 1}  # (answers chosen, others with as many votes) -> choices
    for count in others:
        after: Counter[tuple[int, int]] = Counter()
        for (chosen, ties), number in ways.items():
            for votes in range(min(count, most, size - chosen) + 1):
                after[chosen + votes, ties + (votes == most)] += number * math.comb(count, votes)
        ways = after
    return sum(number * math.comb(silent, size - chosen) / (ties + 1) for (chosen, ties), number in ways.items())


def mean_over_sets(estimates: Sequence[Estimate], lowest: float = 0.0) -> Estimate:
    """The plain mean over independent sets. Distances to the ends add up as squares (MOVER; Zou & Donner, Stat. Med.
    27 (2008) 1693). ``lowest`` is the least that a mean can be: -1 for differences.
    """
    value = fmean(e.value for e in estimates)
    below = math.hypot(*(e.value - e.low for e in estimates)) / len(estimates)
    above = math.hypot(*(e.high - e.value for e in estimates)) / len(estimates)
    return Estimate(value, max(lowest, value - below), min(1.0, value + above))


def mean_difference(differences: Sequence[float], samples: int) -> Estimate:
    """The mean over problems of differences of rates (each in [-1, 1]), with an interval by the t distribution.

    Two made-up problems, ±1/√n apart from 0 for n ``samples``, join for the interval (not for the value). For one
    sample that is Bonett & Price's adjustment for paired proportions (J. Educ. Behav. Stat. 37 (2012) 479): without it,
    runs that agree on every problem would have an interval of no width.
    """
    m = len(differences)
    if not m or samples < 1:
        raise ValueError(f"a difference of {m} problems with {samples} samples: both must be at least 1")
    value, t = fmean(differences), t_quantile(m - 1)
    if math.isinf(t):
        return Estimate(value, -1.0, 1.0)
    center = math.fsum(differences) / (m + 2)
    square = (math.fsum(d * d for d in differences) + 2 / samples) / (m + 2)
    half = t * math.sqrt((square - center**2) / (m + 2))
    return Estimate(value, min(value, max(-1.0, center - half)), max(value, min(1.0, center + half)))


def sign_test(better: int, worse: int) -> float:
    """Two-sided exact p-value of ``better`` against ``worse`` if each were equally likely; 1 without any difference.

    With one sample a problem this is McNemar's exact test.
    """
    n = better + worse
    tail = sum(math.comb(n, i) for i in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**n)
