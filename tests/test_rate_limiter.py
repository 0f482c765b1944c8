"""Samples per insert: the definition of Reverb, and that nobody waits forever."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tianji_jax.rate_limiter import RateLimiter
from tianji_jax.replay_config import ReplayConfig, least_tolerance

RATIOS = st.floats(0.01, 64)
INSERTS = st.integers(1, 400)
UPDATES = st.integers(1, 5000)
SIZES = st.integers(1, 3000)


def reverb_allows(limiter: RateLimiter, ratio: float, size: int, buffer: float, insert: int, sample: int) -> list[bool]:
    """Its `can_insert` and `can_sample` as `rate_limiter.cc` of Reverb has them, counts taken from `limiter`."""
    min_diff, max_diff = ratio * size - buffer, ratio * size + buffer
    inserts, samples = limiter.inserted, limiter.sampled
    free = inserts + insert <= size
    return [
        free or (insert + inserts) * ratio - samples <= max_diff,
        inserts >= size and inserts * ratio - samples - sample >= min_diff,
    ]


@given(RATIOS, SIZES, st.floats(0, 1e5), st.lists(st.tuples(st.booleans(), st.integers(1, 500)), max_size=200))
def test_it_is_the_rate_limiter_of_reverb(
    ratio: float, size: int, buffer: float, calls: list[tuple[bool, int]]
) -> None:
    limiter = RateLimiter(ratio, size, buffer)
    for inserts, count in calls:
        allowed = [limiter.can_insert(count), limiter.can_sample(count)]
        assert allowed == reverb_allows(limiter, ratio, size, buffer, count, count)
        if inserts and allowed[0]:
            limiter.insert(count)
        elif not inserts and allowed[1]:
            limiter.sample(count)


@given(RATIOS, SIZES, INSERTS, UPDATES, st.floats(1, 4), st.lists(st.tuples(st.booleans(), st.floats(0, 1))))
def test_at_any_time_somebody_may_go_on_and_the_ratio_stays_within_its_tolerance(
    ratio: float, size: int, insert: int, update: int, wider: float, wishes: list[tuple[bool, float]]
) -> None:
    # Room for the rounding of the sums.
    tolerance = least_tolerance(ratio, insert, update) * wider * (1 + 1e-9) + 1e-6
    limiter = RateLimiter(ratio, size, tolerance)
    for prefers_insert, part in wishes:
        steps = max(1, round(part * insert))  # not all steps of an insert are valid
        may = {True: limiter.can_insert(steps), False: limiter.can_sample(update)}
        assert any(may.values())
        inserts = prefers_insert if may[prefers_insert] else not prefers_insert
        if inserts:
            limiter.insert(steps)
        else:
            limiter.sample(update)
        if limiter.inserted >= size:
            assert abs(ratio * (limiter.inserted - size) - limiter.sampled) <= tolerance + 1e-6


@pytest.mark.parametrize(
    ("ratio", "insert", "update"), [(8.0, 1024, 128), (0.25, 64, 1024)], ids=["at the start", "later"]
)
def test_with_less_tolerance_than_the_least_both_may_wait_forever(ratio: float, insert: int, update: int) -> None:
    def stuck(tolerance: float) -> bool:
        limiter = RateLimiter(ratio, insert // 2 + 1, tolerance)
        for _ in range(10_000):
            if limiter.can_sample(update):
                limiter.sample(update)
            elif limiter.can_insert(insert):
                limiter.insert(insert)
            else:
                return True
        return False

    least = least_tolerance(ratio, insert, update)
    assert not stuck(least)
    assert stuck(0.4 * least)


def test_the_tolerance_of_a_configuration() -> None:
    config = ReplayConfig(samples_per_insert=2.0, min_size=100, batch_size=32, gradient_steps=2)
    limiter = RateLimiter.of(config, 50, 64)  # one insert and one update: 2 x 50 + 64
    limiter.insert(100)
    assert limiter.samples_per_insert == 0
    assert limiter.can_insert(82)
    assert not limiter.can_insert(83)
    limiter.insert(50)
    assert limiter.can_sample(264)
    assert not limiter.can_sample(265)
    limiter.sample(64)
    assert limiter.samples_per_insert == 64 / 50
    assert RateLimiter.of(config.model_copy(update={"tolerance": 100.0}), 50, 64).can_insert(150)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capacity": 99}, "replay.capacity is 99, less than the 100 steps of one insert"),
        ({"capacity": 500, "min_size": 501}, r"replay.min_size \(501\) must not exceed replay.capacity \(500\)"),
        ({"tolerance": 799.0}, "replay.tolerance is 799 samples, .* need 800 or more"),
    ],
)
def test_settings_that_do_not_fit_are_told(settings: dict[str, float], message: str) -> None:
    problem = ReplayConfig(**settings).problem(100, 128)
    assert problem is not None
    assert re.search(message, problem)
    assert ReplayConfig(tolerance=800.0).problem(100, 128) is None
