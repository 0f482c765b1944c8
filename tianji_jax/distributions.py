"""Distributions over actions, as stateless objects that take their parameters from a network's output.

`distribution(action_spec)` picks one. What it samples is `raw`: for discrete actions the action itself, for continuous
ones the sample before clipping or squashing. `to_action(raw)` is what the environment
takes. Clipping cannot be undone and undoing tanh is not stable: for the loss it is `raw` that has to be kept.
"""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from tianji_jax.types import ActionSpec, ContinuousActions, DiscreteActions, MultiDiscreteActions

_FORBIDDEN_LOGIT = -1e9
_LOG_2 = math.log(2.0)


class Distribution(Protocol):
    """A family of distributions over actions of `A` entries (discrete actions: a scalar, no `A` dimension).

    Parameters are float32 `[..., num_parameters + num_shared_parameters]`, the shared ones last.
    """

    @property
    def num_parameters(self) -> int:
        """How many outputs the network's head needs."""

    @property
    def num_shared_parameters(self) -> int:
        """How many learned numbers, the same for all states, are appended to the head's outputs."""

    def sample(self, parameters: jax.Array, rng: jax.Array) -> jax.Array:
        """A raw action `[..., A]`."""

    def mode(self, parameters: jax.Array) -> jax.Array:
        """The raw action to take when not exploring, `[..., A]`."""

    def log_prob(self, parameters: jax.Array, raw: jax.Array) -> jax.Array:
        """Log-probability or log-density of a raw action, float32 `[...]`."""

    def entropy(self, parameters: jax.Array) -> jax.Array:
        """Entropy in nats, float32 `[...]`."""

    def to_action(self, raw: jax.Array) -> jax.Array:
        """What the environment takes, `[..., A]`."""


def distribution(action_spec: ActionSpec, squash: bool = False) -> Distribution:
    """The distribution that fits an action specification.

    Args:
      action_spec: from `EnvSpec.action`.
      squash: for continuous actions: a tanh-squashed Gaussian in place of a clipped one.

    Raises:
      ValueError: `squash` with actions that are not continuous or not bounded on both sides.
    """
    match action_spec:
        case ContinuousActions(low, high) if squash:
            return TanhGaussian(low, high)
        case ContinuousActions(low, high):
            return Gaussian(low, high)
        case _ if squash:
            raise ValueError(f"squash is for continuous actions, not for {action_spec}")
        case DiscreteActions(num_values):
            return Categorical(num_values)
        case MultiDiscreteActions(num_values):
            return MultiCategorical(num_values)
    raise ValueError(f"no distribution for {action_spec}: it must be discrete, multi-discrete or continuous")


def mask_logits(logits: jax.Array, allowed: jax.Array) -> jax.Array:
    """Logits `[..., n]` that give forbidden values probability exactly zero and no gradient.

    Where nothing at all is allowed (an observation without a turn, such as the last one) all values are equally likely.

    Args:
      logits: parameters of a `Categorical` or `MultiCategorical`.
      allowed: bool or integer `[..., n]`, non-zero where allowed.
    """
    return jnp.where(allowed != 0, logits, _FORBIDDEN_LOGIT)


@dataclass(frozen=True)
class Categorical:
    """One choice out of `num_values`; the parameters are logits."""

    num_values: int
    num_shared_parameters = 0

    @property
    def num_parameters(self) -> int:
        return self.num_values

    def sample(self, parameters: jax.Array, rng: jax.Array) -> jax.Array:
        return jax.random.categorical(rng, parameters).astype(jnp.int32)

    def mode(self, parameters: jax.Array) -> jax.Array:
        return jnp.argmax(parameters, axis=-1).astype(jnp.int32)

    def log_prob(self, parameters: jax.Array, raw: jax.Array) -> jax.Array:
        log_probs = jax.nn.log_softmax(parameters)
        return jnp.take_along_axis(log_probs, raw[..., None], axis=-1)[..., 0]

    def entropy(self, parameters: jax.Array) -> jax.Array:
        log_probs = jax.nn.log_softmax(parameters)
        return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)

    def to_action(self, raw: jax.Array) -> jax.Array:
        return raw


@dataclass(frozen=True)
class MultiCategorical:
    """Independent choices, choice `i` out of `num_values[i]`; the parameters are their logits one after the other."""

    num_values: tuple[int, ...]
    num_shared_parameters = 0

    @property
    def num_parameters(self) -> int:
        return sum(self.num_values)

    def sample(self, parameters: jax.Array, rng: jax.Array) -> jax.Array:
        rngs = jax.random.split(rng, len(self.num_values))
        choices = zip(self._choices(), self._split(parameters), rngs, strict=True)
        return jnp.stack([choice.sample(logits, rng) for choice, logits, rng in choices], axis=-1)

    def mode(self, parameters: jax.Array) -> jax.Array:
        choices = zip(self._choices(), self._split(parameters), strict=True)
        return jnp.stack([choice.mode(logits) for choice, logits in choices], axis=-1)

    def log_prob(self, parameters: jax.Array, raw: jax.Array) -> jax.Array:
        choices = enumerate(zip(self._choices(), self._split(parameters), strict=True))
        return jnp.stack([choice.log_prob(logits, raw[..., i]) for i, (choice, logits) in choices]).sum(axis=0)

    def entropy(self, parameters: jax.Array) -> jax.Array:
        choices = zip(self._choices(), self._split(parameters), strict=True)
        return jnp.stack([choice.entropy(logits) for choice, logits in choices]).sum(axis=0)

    def to_action(self, raw: jax.Array) -> jax.Array:
        return raw

    def _choices(self) -> list[Categorical]:
        return [Categorical(n) for n in self.num_values]

    def _split(self, parameters: jax.Array) -> list[jax.Array]:
        return jnp.split(parameters, list(accumulate(self.num_values))[:-1], axis=-1)


@dataclass(frozen=True)
class Gaussian:
    """A diagonal Gaussian whose log standard deviation is learned but the same in all states.

    The density is that of the unclipped sample, which is what is raw; the environment's action is clipped to the bounds
    afterwards. Parameters are the means and then the log standard deviations.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def num_parameters(self) -> int:
        return len(self.low)

    @property
    def num_shared_parameters(self) -> int:
        return len(self.low)

    def sample(self, parameters: jax.Array, rng: jax.Array) -> jax.Array:
        mean, log_std = jnp.split(parameters, 2, axis=-1)
        return mean + jnp.exp(log_std) * jax.random.normal(rng, mean.shape, mean.dtype)

    def mode(self, parameters: jax.Array) -> jax.Array:
        return jnp.split(parameters, 2, axis=-1)[0]

    def log_prob(self, parameters: jax.Array, raw: jax.Array) -> jax.Array:
        mean, log_std = jnp.split(parameters, 2, axis=-1)
        deviation = (raw - mean) * jnp.exp(-log_std)
        return -jnp.sum(0.5 * deviation**2 + log_std + 0.5 * math.log(2.0 * math.pi), axis=-1)

    def entropy(self, parameters: jax.Array) -> jax.Array:
        log_std = jnp.split(parameters, 2, axis=-1)[1]
        return jnp.sum(log_std + 0.5 * math.log(2.0 * math.pi * math.e), axis=-1)

    def to_action(self, raw: jax.Array) -> jax.Array:
        return jnp.clip(raw, np.asarray(self.low, np.float32), np.asarray(self.high, np.float32))


@dataclass(frozen=True)
class TanhGaussian(Gaussian):
    """A Gaussian squashed by tanh and scaled to the bounds (Haarnoja et al. 2018, SAC, appendix C).

    Raw is the sample before tanh: tanh is never inverted. The density is that of the environment's action. The mode is
    the squashed mean. Parameters as for `Gaussian`, with its state-independent standard deviation.

    Raises:
      ValueError: a bound is infinite.
    """

    def __post_init__(self) -> None:
        if not np.all(np.isfinite([*self.low, *self.high])):
            raise ValueError(f"squash needs actions bounded on both sides, not low={self.low}, high={self.high}")

    def log_prob(self, parameters: jax.Array, raw: jax.Array) -> jax.Array:
        return super().log_prob(parameters, raw) - jnp.sum(self._log_slope(raw), axis=-1)

    def entropy(self, parameters: jax.Array) -> jax.Array:
        """Entropy of the action: the Gaussian's plus the mean log slope, by Gauss-Hermite quadrature.

        A sum of 32 terms per entry: exact to about 1e-3 up to a standard deviation of 2, and no sampling noise.
        """
        mean, log_std = jnp.split(parameters, 2, axis=-1)
        nodes, weights = np.polynomial.hermite_e.hermegauss(32)
        samples = mean[..., None] + jnp.exp(log_std)[..., None] * nodes.astype(np.float32)
        slope = jnp.sum(_log_tanh_slope(samples) * (weights / weights.sum()).astype(np.float32), axis=-1)
        return super().entropy(parameters) + jnp.sum(slope + np.log(self._half_range()), axis=-1)

    def to_action(self, raw: jax.Array) -> jax.Array:
        low, high = np.asarray(self.low, np.float32), np.asarray(self.high, np.float32)
        # Clipped because float32 rounding may step over a bound.
        return jnp.clip(low + (jnp.tanh(raw) + 1.0) * self._half_range(), low, high)

    def _half_range(self) -> np.ndarray:
        return (np.asarray(self.high, np.float32) - np.asarray(self.low, np.float32)) / 2

    def _log_slope(self, raw: jax.Array) -> jax.Array:
        """Log of the derivative of `to_action`, `[..., A]`."""
        return _log_tanh_slope(raw) + np.log(self._half_range())


def _log_tanh_slope(x: jax.Array) -> jax.Array:
    """`log(1 - tanh(x)^2)` without the cancellation for large `x`."""
    return 2.0 * (_LOG_2 - x - jax.nn.softplus(-2.0 * x))
