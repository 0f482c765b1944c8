"""What the system sees of environments, and what every adapter shares: action checks and episode counts."""

from typing import Any, NamedTuple, Protocol

import numpy as np

from tianji_jax.types import ActionSpec, ContinuousActions, DiscreteActions, EnvSpec, Episode, PyTree


class EnvironmentConfigError(ValueError):
    """The configured environment does not exist or does not fit; the message says what would."""


class Step(NamedTuple):
    """What `B` environments answered to one action each.

    Environments reset by themselves on the step *after* an episode ended: that step ignores its action and returns
    the first observation of the next episode. The observation that comes with `terminated` or `truncated` is thus the
    true last one of its episode.

    Attributes:
      observation: array or dict of arrays `[B, ...]`, dtypes as `EnvSpec.observation` says.
      is_first: bool `[B]`; the observation is the first of an episode (or of a life, where a lost life ends one).
      reward: float32 `[B]`; 0 where the step is not valid.
      terminated: bool `[B]`; the episode ended by the task's own rules.
      truncated: bool `[B]`; the episode was cut off from outside. Never set together with `terminated`.
      valid: bool `[B]`; False where the step only reset the environment. Always `~is_first`.
      episodes: those finished in this step, in the order of their environments.
    """

    observation: PyTree
    is_first: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray
    episodes: list[Episode]


class Environments(Protocol):
    """A fixed number of environments that step together.

    `send` starts a step and `recv` waits for it, so that two sets of environments can take turns: one computes while
    the policy works for the other. The arrays of a `Step` belong to the caller: no later step writes to them.
    """

    spec: EnvSpec
    num_environments: int

    def reset(self) -> Step:
        """Start all environments; every observation is a first one and no step is valid."""

    def send(self, action: np.ndarray) -> None:
        """Start a step with `action` `[B, ...]`.

        Raises:
          ValueError: the actions are not what `spec.action` says; nothing was started.
          RuntimeError: there was no `reset` yet, or the last step was not received yet.
        """

    def recv(self) -> Step:
        """Wait for the step that `send` started; rows in the order of the environments.

        Raises:
          RuntimeError: there is no such step.
        """

    def step(self, action: np.ndarray) -> Step:
        """`send` and `recv`."""

    def render(self) -> np.ndarray:
        """What the first environment looks like now, uint8 `[height, width, 3]`; needs option `render_mode: rgb_array`.

        MuJoCo inside EnvPool ends the process where it finds no OpenGL.

        Raises:
          EnvironmentConfigError: there is nothing to see.
        """

    def close(self) -> None:
        """Free the environments; a second call does nothing."""


class Turn:
    """Keeps `reset`, `send`, `recv` in order: adapters call it before they act."""

    def __init__(self) -> None:
        self._state = "new"

    def reset(self) -> None:
        if self._state == "closed":
            raise RuntimeError("reset() of environments that are closed")
        if self._state == "pending":
            raise RuntimeError("reset() while a step is under way: call recv() first")
        self._state = "ready"

    def send(self) -> None:
        if self._state != "ready":
            hint = {"new": "call reset() first", "pending": "call recv() first", "closed": "they are closed"}
            raise RuntimeError(f"send() to environments that are not waiting for actions: {hint[self._state]}")
        self._state = "pending"

    def recv(self) -> None:
        if self._state != "pending":
            raise RuntimeError("recv() without a step under way: call send() first")
        self._state = "ready"

    def close(self) -> bool:
        """Whether this is the first call."""
        first, self._state = self._state != "closed", "closed"
        return first


class ActionCheck:
    """Checks a batch of actions before the environments see it, because EnvPool does not.

    (A wrong number of actions aborts the process inside EnvPool, and a discrete action out of range is accepted.)
    """

    # Scaling a squashed action to its bounds in float32 may overshoot by rounding.
    _ROUNDING = 1e-5

    def __init__(self, spec: ActionSpec, num_environments: int) -> None:
        array = spec.array.prepend(num_environments)
        self._shape, self._dtype = array.shape, array.dtype
        self._continuous = isinstance(spec, ContinuousActions)
        self._low: Any
        self._high: Any
        if isinstance(spec, ContinuousActions):
            self._low, self._high = (np.array(bound, np.float32) for bound in (spec.low, spec.high))
            span = np.where(np.isfinite(self._high - self._low), self._high - self._low, 0)
            margin = np.float32(self._ROUNDING) * span
            self._allowed = (self._low - margin, self._high + margin)
        elif isinstance(spec, DiscreteActions):
            self._low, self._high = 0, spec.num_values - 1
        else:
            self._low, self._high = 0, np.asarray(spec.num_values) - 1

    def __call__(self, action: Any) -> np.ndarray:
        """The actions as a contiguous array of the spec's dtype.

        Raises:
          ValueError: wrong shape, a dtype of another kind, an action out of range or not finite.
        """
        action = np.asarray(action)
        if action.shape != self._shape:
            raise ValueError(f"actions of shape {action.shape}, expected {self._shape}: one per environment")
        if self._continuous:
            return self._check_continuous(action)
        if action.dtype.kind not in "iu":
            raise ValueError(f"actions of dtype {action.dtype}, expected integers ({self._dtype})")
        if isinstance(self._high, int):
            inside = action.min() >= 0 and action.max() <= self._high
        else:
            inside = bool(((action >= 0) & (action <= self._high)).all())
        if not inside:
            raise ValueError(f"action out of range: got {self._first_outside(action, 0, self._high)}")
        return np.ascontiguousarray(action, self._dtype)

    def _check_continuous(self, action: np.ndarray) -> np.ndarray:
        if action.dtype.kind != "f":
            raise ValueError(f"actions of dtype {action.dtype}, expected floating point ({self._dtype})")
        low, high = self._allowed
        if not np.isfinite(action).all():
            index = tuple(np.argwhere(~np.isfinite(action))[0])
            raise ValueError(f"action not finite: got {action[index]} in environment {index[0]}")
        if not ((action >= low) & (action <= high)).all():
            raise ValueError(f"action out of range: got {self._first_outside(action, low, high)}")
        return np.clip(action, self._low, self._high).astype(self._dtype, copy=False)

    def _first_outside(self, action: np.ndarray, low: Any, high: Any) -> str:
        index = tuple(np.argwhere((action < low) | (action > high))[0])
        lowest, highest = (np.broadcast_to(b, self._shape)[index] for b in (self._low, self._high))
        return f"{action[index]} in environment {index[0]}, allowed is {lowest} to {highest}"


class EpisodeCounter:
    """Adds up the return and length of the episode each environment is in."""

    def __init__(self, num_environments: int) -> None:
        # Double precision: a float32 sum of 100,000 small rewards would be visibly off.
        self._return = np.zeros(num_environments, np.float64)
        self._length = np.zeros(num_environments, np.int64)

    def reset(self) -> None:
        self._return[:] = 0
        self._length[:] = 0

    def add(self, reward: np.ndarray, valid: np.ndarray, over: np.ndarray) -> list[Episode]:
        """Count one step of each environment.

        Args:
          reward: `[B]`, unclipped, 0 where not valid.
          valid: bool `[B]`; steps that count towards the length.
          over: bool `[B]`; the episode ends with this step.

        Returns:
          The episodes that ended.
        """
        self._return += reward
        self._length += valid
        if not over.any():
            return []
        ended = np.flatnonzero(over)
        episodes = [Episode(float(self._return[i]), int(self._length[i])) for i in ended]
        self._return[ended] = 0
        self._length[ended] = 0
        return episodes
