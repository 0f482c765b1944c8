"""Running statistics that live in the training state: observation normalisers and the reward scale.

They are pytrees of arrays, the same on every device, updated from a batch inside the learner's update and frozen
everywhere else (actors get them with the parameters).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_MAX_COUNT = 2**31 - 1
_EPSILON = 1e-8


class RunningStatistics(NamedTuple):
    """Mean and variance of everything seen so far.

    The variance is kept rather than the sum of squares, and the count as an integer that stops at its largest value
    rather than wrapping, so that float32 is enough for any length of run.

    Attributes:
      num_samples: int32 scalar; samples seen, at most 2^31 - 1. After that the statistics go on as a moving average.
      mean: float32, the shape of one sample.
      variance: float32, the shape of one sample; the population's (divided by the count).
    """

    num_samples: jax.Array
    mean: jax.Array
    variance: jax.Array


def initial_statistics(shape: tuple[int, ...] = ()) -> RunningStatistics:
    """Statistics of no samples; `normalise` with them only clips.

    Args:
      shape: of one sample.
    """
    return RunningStatistics(jnp.zeros((), jnp.int32), jnp.zeros(shape), jnp.ones(shape))


def update_statistics(
    statistics: RunningStatistics, x: jax.Array, valid: jax.Array, axis_name: str | None = None
) -> RunningStatistics:
    """Merge the valid samples of all devices (Chan et al. 1979, equation 2.1, pairwise merging of moments).

    Args:
      statistics: the same on every device.
      x: samples of this device, `[..., *shape]`.
      valid: bool `[...]`, the samples that count (a positive step weight says the same).
      axis_name: the axis to sum over; the result is the same on every device.
    """
    mask = valid.reshape(valid.shape + (1,) * (x.ndim - valid.ndim))
    axes = tuple(range(valid.ndim))
    x = x.astype(jnp.float32)

    def total(values: jax.Array) -> jax.Array:
        summed = jnp.sum(jnp.where(mask, values, 0), axis=axes)
        return summed if axis_name is None else jax.lax.psum(summed, axis_name)

    count = jnp.sum(valid, dtype=jnp.int32)
    count = count if axis_name is None else jax.lax.psum(count, axis_name)
    n = jnp.maximum(count, 1).astype(jnp.float32)
    # Sums of differences from a mean that is about right: the sum of squares of large numbers would cancel.
    shift = total(x - statistics.mean) / n
    variance = total((x - statistics.mean - shift) ** 2) / n

    merged = statistics.num_samples + jnp.minimum(count, _MAX_COUNT - statistics.num_samples)
    fraction = count.astype(jnp.float32) / (statistics.num_samples.astype(jnp.float32) + n)
    fraction = jnp.where(count > 0, fraction, 0.0)
    return RunningStatistics(
        num_samples=merged,
        mean=statistics.mean + fraction * shift,
        variance=(1 - fraction) * statistics.variance + fraction * variance + fraction * (1 - fraction) * shift**2,
    )


def normalise(statistics: RunningStatistics, x: jax.Array, clip: float = 10.0) -> jax.Array:
    """`x` less the mean over the standard deviation, clipped to plus or minus `clip`; float32 `[..., *shape]`."""
    scaled = (x.astype(jnp.float32) - statistics.mean) * jax.lax.rsqrt(statistics.variance + _EPSILON)
    return jnp.clip(scaled, -clip, clip)


class RewardScale(NamedTuple):
    """Running root mean square of discounted returns.

    What is usual (Engstrom et al. 2020, section 3) keeps one discounted sum of rewards per environment and divides
    rewards by its standard deviation. A learner sees unrolls out of any order and has no such sums, so it takes the
    discounted return *from* each step to the end of episode or unroll, the rest being the value estimate brought back
    to the rewards' units. And it takes the root of the mean square, not the standard deviation: the returns of a policy
    that does equally well everywhere hardly vary, and dividing by that would blow the rewards up. Scaled returns are
    then of order 1.

    Attributes:
      num_samples: int32 scalar; returns seen, at most 2^31 - 1.
      mean_square: float32 scalar, in squared units of the rewards.
    """

    num_samples: jax.Array
    mean_square: jax.Array

    @property
    def scale(self) -> jax.Array:
        """What rewards are divided by; 1 before anything was seen or while all returns were zero."""
        return jnp.where(self.mean_square > 0, jnp.sqrt(self.mean_square), 1.0)


def initial_reward_scale() -> RewardScale:
    """The scale of no returns, which is 1."""
    return RewardScale(jnp.zeros((), jnp.int32), jnp.zeros(()))


def update_reward_scale(
    scale: RewardScale, returns: jax.Array, valid: jax.Array, axis_name: str | None = None
) -> RewardScale:
    """Take in the returns of all devices.

    Args:
      scale: the same on every device.
      returns: float32 `[T, b]`, discounted, in the units of the rewards (`gae(..., trace_lambda=1).target`).
      valid: bool `[T, b]`, the steps that count.
      axis_name: the axis to sum over; the result is the same on every device.
    """
    squares = RunningStatistics(scale.num_samples, scale.mean_square, jnp.zeros(()))
    squares = update_statistics(squares, returns**2, valid, axis_name)
    return RewardScale(squares.num_samples, squares.mean)
