"""Noise schedules against numbers computed by hand."""

import pytest

from registry.noise import (
    SCHEDULES,
    Constant,
    Cosine,
    Exponential,
    Linear,
    Logarithmic,
    NoiseSchedule,
    NoNoise,
)

# σ from 0.016 or 0.009 down to 0.001 in 5 levels: halving; four equal steps; ½(1 ± √½) of 0.008; log₅ k of 0.008
# (log₅ 2 = 0.430676558073, log₅ 3 = 0.682606194486).
LEVELS = [
    (Exponential, 0.016, [0.016, 0.008, 0.004, 0.002, 0.001]),
    (Linear, 0.009, [0.009, 0.007, 0.005, 0.003, 0.001]),
    (Cosine, 0.009, [0.009, 0.00782842712474619, 0.005, 0.00217157287525381, 0.001]),
    (Logarithmic, 0.009, [0.009, 0.005554587535416, 0.003539150444112, 0.002109175070824, 0.001]),
]


@pytest.mark.parametrize(("schedule", "start", "expected"), LEVELS)
def test_levels(schedule: type[NoiseSchedule], start: float, expected: list[float]) -> None:
    noise = schedule(start, 0.001, 5)
    assert [noise.level(k) for k in range(1, 6)] == pytest.approx(expected, rel=1e-9)


def test_paper_settings() -> None:
    """Eq. 8 with σ from 1e-2 to 5e-4 and K = 10: a ratio of 20 over nine steps, so 20^(1/3) every three levels."""
    noise = Exponential()
    third = 20 ** (1 / 3)
    assert third == pytest.approx(2.7144176165949)
    expected = [1e-2, 1e-2 / 2.7144176165949, 1e-2 / 7.3680629972808, 5e-4]
    assert [noise.level(k) for k in (1, 4, 7, 10)] == pytest.approx(expected, rel=1e-12)


def test_stages_of_600_steps() -> None:
    """11 stages of 54.5 steps: stage s starts at ⌈600 s / 11⌉."""
    noise = Linear(sigma_start=1.0, sigma_end=0.1)  # level k is (11 - k)/10
    starts = [0, 55, 110, 164, 219, 273, 328, 382, 437, 491, 546]
    sigmas = [0.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    assert [noise.sigma(step, 600) for step in starts] == pytest.approx(sigmas, abs=1e-12)
    assert [noise.sigma(step - 1, 600) for step in [*starts[1:], 600]] == pytest.approx(sigmas, abs=1e-12)


def test_run_as_long_as_its_stages() -> None:
    noise = Exponential(0.016, 0.001, 5)
    assert [noise.sigma(step, 6) for step in range(6)] == pytest.approx([0.0, 0.016, 0.008, 0.004, 0.002, 0.001])


def test_short_run_skips_stages() -> None:
    noise = Exponential(0.016, 0.001, 5)
    assert [noise.sigma(step, 3) for step in range(3)] == pytest.approx([0.0, 0.008, 0.002])
    assert noise.sigma(0, 1) == 0.0


def test_steps_after_the_end_stay_in_the_last_stage() -> None:
    assert Exponential(0.016, 0.001, 5).sigma(1000, 600) == pytest.approx(0.001)


def test_constant_has_no_clean_stage() -> None:
    assert [Constant(0.03).sigma(step, 11) for step in range(11)] == [0.03] * 11


def test_no_noise() -> None:
    assert [NoNoise().sigma(step, 11) for step in range(11)] == [0.0] * 11


def test_two_stages() -> None:
    for schedule in (Exponential, Linear, Cosine, Logarithmic):
        noise = schedule(0.4, 0.1, 2)
        assert [noise.sigma(step, 3) for step in range(3)] == pytest.approx([0.0, 0.4, 0.1])


def test_registered_names() -> None:
    assert {name: SCHEDULES[name] for name in SCHEDULES} == {
        "constant": Constant, "cosine": Cosine, "exponential": Exponential,
        "linear": Linear, "logarithmic": Logarithmic, "none": NoNoise,
    }  # fmt: skip


def test_linear_may_end_without_noise() -> None:
    assert Linear(0.01, 0.0, 5).level(5) == pytest.approx(0.0, abs=1e-18)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Exponential(sigma_end=0.0), r"sigma_end > 0, got 0\.01 and 0\.0; use noise: linear"),
        (lambda: Linear(sigma_start=-0.1), r"sigma_start must be .* at least 0, got -0\.1"),
        (lambda: Cosine(sigma_end=float("nan")), "sigma_end must be a finite number .* got nan"),
        (lambda: Linear(sigma_start=float("inf")), "sigma_start must be a finite number .* got inf"),
        (lambda: Linear(num_stages=1), "num_stages must be at least 2, got 1; for one level use noise: constant"),
        (lambda: Constant(0.0), "sigma > 0, got 0; use noise: none"),
        (lambda: Linear().sigma(-1, 10), "step must be >= 0"),
        (lambda: Linear().sigma(0, 0), "total_steps >= 1, got 0 and 0"),
    ],
)
def test_mistakes(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
