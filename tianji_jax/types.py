"""The nouns of the system: what environments, actors, the wire and the learner say to each other.

Shapes use `T` for the unroll length, `B` for the environments of one trajectory, `N` for the trajectories of one
update, `D` for the learner's devices, `b = N * B / D` for the environments of one device's shard and `S` for the
transitions, or unrolls, one device draws from replay. Trajectories are time-major.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

PyTree = Any
"""A nesting of dicts, tuples and named tuples with arrays (or specs) at its leaves."""

DATA_AXIS = "data"
"""The name of the mesh axis over which a learner's devices share a batch."""


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one array.

    A leaf, not a container: `jax.tree` functions stop at it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))

    @property
    def nbytes(self) -> int:
        """Size of one such array in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def prepend(self, *dims: int) -> "ArraySpec":
        """The spec of this array with leading dimensions `dims`."""
        return ArraySpec((*dims, *self.shape), self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class DiscreteActions:
    """One choice out of `num_values`; an action is an int32 scalar in `[0, num_values)`."""

    num_values: int

    @property
    def array(self) -> ArraySpec:
        """Spec of one action."""
        return ArraySpec((), np.dtype(np.int32))


@dataclass(frozen=True)
class MultiDiscreteActions:
    """Several independent choices; an action is an int32 vector, entry `i` in `[0, num_values[i])`."""

    num_values: tuple[int, ...]

    @property
    def array(self) -> ArraySpec:
        """Spec of one action."""
        return ArraySpec((len(self.num_values),), np.dtype(np.int32))


@dataclass(frozen=True)
class ContinuousActions:
    """A float32 vector of `len(low)` entries with bounds `low <= action <= high` (infinite where unbounded)."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def array(self) -> ArraySpec:
        """Spec of one action."""
        return ArraySpec((len(self.low),), np.dtype(np.float32))


ActionSpec = DiscreteActions | MultiDiscreteActions | ContinuousActions


@dataclass(frozen=True)
class EnvSpec:
    """What an agent may know of its environment.

    Attributes:
      name: as configured, for example `envpool:CartPole-v1`.
      observation: one `ArraySpec`, or a dict of them, for one environment (no batch dimension).
      action: what the environment takes.
      action_mask: the key of the observation that tells allowed actions (bool or integer, non-zero = allowed; as long
        as the action has values), or None where all actions are always allowed.
      frame_skip: frames of the underlying game per environment step.
      stop_at_return: the return at which the environment counts as solved, None where it does not say.
    """

    name: str
    observation: ArraySpec | dict[str, ArraySpec]
    action: ActionSpec
    action_mask: str | None = None
    frame_skip: int = 1
    stop_at_return: float | None = None


class Stamp(NamedTuple):
    """Where a trajectory comes from.

    Attributes:
      policy_version: version of the parameters that chose its actions (held for the whole unroll).
      actor_id: the actor, from 0.
      sequence: number of the trajectory within its actor, from 0 without gaps.
    """

    policy_version: int
    actor_id: int
    sequence: int


class Episode(NamedTuple):
    """A finished episode as its player would count it: undiscounted, unclipped, over all lives."""

    episode_return: float
    length: int


class Trajectory(NamedTuple):
    """`T` consecutive steps of `B` environments.

    Step `t` is: see `observation[t]`, take `action[t]`, get `reward[t]`, see `observation[t + 1]`. Consecutive
    trajectories of an actor share one observation (the last of one is the first of the next), never a step.

    Attributes:
      observation: pytree of `[T + 1, B, ...]`; the last one is there to bootstrap from.
      is_first: bool `[T + 1, B]`; the observation is the first of an episode.
      action: `[T, B, ...]`.
      reward: float32 `[T, B]`, as the environment gave it.
      terminated: bool `[T, B]`; the episode ended by the task's own rules: no value beyond.
      truncated: bool `[T, B]`; the episode was cut off from outside (time limit): bootstrap from `observation[t + 1]`,
        which is the true last observation. Never set together with `terminated`.
      valid: bool `[T, B]`; False where the step only reset the environment and is no transition.
      extras: what the agent recorded while acting (`log_prob`, `value` ...): pytree of `[T, B, ...]`.
      state: recurrent state before step 0, pytree of `[B, ...]`; empty for feed-forward agents.
    """

    observation: PyTree
    is_first: Any
    action: Any
    reward: Any
    terminated: Any
    truncated: Any
    valid: Any
    extras: PyTree
    state: PyTree


class Batch(NamedTuple):
    """What one device learns from in one update.

    Attributes:
      trajectory: as `Trajectory`, with `b` environments in place of `B`.
      lag: int32 `[b]`; learner version minus the version that acted, from 0 to `staleness.max_lag`.
      stale: bool `[b]`; the lag is beyond `staleness.fresh_lag`: the loss has to correct for it.
      weight: float32 `[T, b]`; zero at invalid steps, elsewhere one number such that `mean(weight * x)`, averaged over
        the devices, is the mean of `x` over all valid steps of all devices.
    """

    trajectory: Trajectory
    lag: jax.Array
    stale: jax.Array
    weight: jax.Array


class Sample(NamedTuple):
    """Transitions over up to `n` steps, drawn from replay: what one device learns from in one gradient step.

    Attributes:
      observation: pytree of `[S, ...]`.
      action: `[S, ...]`; taken there.
      reward: float32 `[S]`; the discounted sum of the `k <= n` rewards from there, fewer than `n` where the episode or
        the unroll ended sooner.
      discount: float32 `[S]`; what the value of `next_observation` counts: `discount ** k`, 0 after a termination.
      next_observation: pytree of `[S, ...]`; the observation after `k` steps, an episode's true last one where it was
        cut off.
      weight: float32 `[S]`; importance weights, the largest over all devices is 1. 0 where nothing could be drawn.
      age: int32 `[S]`; learner version minus the version that acted.
    """

    observation: PyTree
    action: jax.Array
    reward: jax.Array
    discount: jax.Array
    next_observation: PyTree
    weight: jax.Array
    age: jax.Array


class SampledUnrolls(NamedTuple):
    """Whole unrolls drawn from replay: what one device of a recurrent agent learns from in one gradient step.

    Attributes:
      trajectory: as `Trajectory`, with `S` unrolls in place of `B` environments; its recurrent state is the one the
        actor had, which depends on parameters that are older than the learner's.
      weight: float32 `[S]`; as in `Sample`.
      age: int32 `[S]`; as in `Sample`.
    """

    trajectory: Trajectory
    weight: jax.Array
    age: jax.Array


def trajectory_spec(
    env_spec: EnvSpec, unroll_length: int, environments: int, extras: PyTree, state: PyTree
) -> Trajectory:
    """The spec of every array of a trajectory, as a `Trajectory` with `ArraySpec` leaves.

    Args:
      env_spec: of the environment.
      unroll_length: `T`.
      environments: `B`.
      extras: pytree of `ArraySpec` of one environment's extras (no leading dimensions).
      state: pytree of `ArraySpec` of one environment's recurrent state (no leading dimensions).
    """
    steps, flag = (unroll_length, environments), ArraySpec((), np.dtype(bool))

    def prepend(tree: PyTree, *dims: int) -> PyTree:
        return jax.tree.map(lambda spec: spec.prepend(*dims), tree)

    return Trajectory(
        observation=prepend(env_spec.observation, unroll_length + 1, environments),
        is_first=flag.prepend(unroll_length + 1, environments),
        action=env_spec.action.array.prepend(*steps),
        reward=ArraySpec(steps, np.dtype(np.float32)),
        terminated=flag.prepend(*steps),
        truncated=flag.prepend(*steps),
        valid=flag.prepend(*steps),
        extras=prepend(extras, *steps),
        state=prepend(state, environments),
    )
