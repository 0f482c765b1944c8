"""What the root does with the groups' changes, against averages and textbook momentum."""

import hypothesis.extra.numpy as hnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tianji_jax.outer import OuterOptimiser

FLOATS = st.floats(-10, 10, width=32)


@given(hnp.arrays(np.float32, (4, 3), elements=FLOATS), hnp.arrays(np.float32, 3, elements=FLOATS))
def test_without_momentum_groups_that_begin_together_are_averaged(own: np.ndarray, start: np.ndarray) -> None:
    optimiser = OuterOptimiser([start], learning_rate=1.0, momentum=0.0)
    for group in own:
        optimiser.step([group - start], groups=len(own))
    np.testing.assert_allclose(optimiser.values[0], own.mean(0), atol=1e-4)
    assert optimiser.values[0].dtype == np.float32


@given(
    hnp.arrays(np.float64, (5, 3, 2), elements=st.floats(-1, 1)),
    st.floats(0.1, 1),
    st.floats(0, 0.95),
)
def test_whole_rounds_are_steps_of_nesterov_momentum(changes: np.ndarray, rate: float, momentum: float) -> None:
    """Sutskever et al. 2013 in the form that deep learning libraries have: v = b v + g; x -= a (g + b v)."""
    optimiser = OuterOptimiser([np.ones(2, np.float32)], rate, momentum)
    x, v = np.ones(2), np.zeros(2)
    for change_of_each in changes:
        for change in change_of_each:
            optimiser.step([change.astype(np.float32)], groups=3)
        g = -change_of_each.mean(0)
        v = momentum * v + g
        x = x - rate * (g + momentum * v)
    np.testing.assert_allclose(optimiser.values[0], x, atol=1e-4)


def test_each_change_counts_at_once_and_arrays_given_out_stay_as_they_were() -> None:
    optimiser = OuterOptimiser([np.zeros(1, np.float32)], 0.5, 0.9)
    before = optimiser.values[0]
    optimiser.step([np.float32([4])], groups=2)
    assert optimiser.values[0] == [1]
    assert before == [0]
    optimiser.step([np.float32([4])], groups=2)
    # The second completes the round: 1 + 0.5 * 2, and momentum 0.5 * 0.9 * 4.
    np.testing.assert_allclose(optimiser.values[0], [2 + 1.8])


def test_a_round_ends_when_groups_have_fallen_away() -> None:
    optimiser = OuterOptimiser([np.zeros(1, np.float32)], 1.0, 0.5)
    optimiser.step([np.float32([2])], groups=2)
    optimiser.step([np.float32([2])], groups=1)
    np.testing.assert_allclose(optimiser.values[0], [1 + 2 + 0.5 * 3])
