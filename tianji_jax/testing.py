"""Fakes whose numbers are known in advance, for the tests of this package and of yours.

In a configuration they are named `tianji_jax.testing:CountingEnv` and `tianji_jax.testing:TrivialAgent`.
"""

import time
from typing import Any, Literal, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from tianji_jax.agent import AgentConfig, Fused, Metrics
from tianji_jax.types import Batch, DiscreteActions, EnvSpec, PyTree


class CountingEnv(gymnasium.Env):
    """An environment that counts: observation float32 `[2]` = (episode, step), both from 0; reward `step + 1`.

    The reward does not depend on the action (0 or 1); the return of an episode of `n` steps is `n * (n + 1) / 2`.

    Args:
      episode_length: steps per episode.
      end: whether the last step says `terminate` or `truncate`.
      step_seconds: to sleep in each step.
      make_seconds: to sleep in the constructor.
      fail_at_step: raise `RuntimeError` in this step, counted from 1 over all episodes; None for never.
    """

    def __init__(
        self,
        episode_length: int = 10,
        end: Literal["terminate", "truncate"] = "terminate",
        step_seconds: float = 0.0,
        make_seconds: float = 0.0,
        fail_at_step: int | None = None,
    ) -> None:
        if episode_length < 1 or end not in ("terminate", "truncate"):
            raise ValueError(f"{episode_length=}, {end=}: allowed are 1 or more, 'terminate' or 'truncate'")
        time.sleep(make_seconds)
        self.observation_space = spaces.Box(0, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._length, self._end = episode_length, end
        self._seconds, self._fail_at = step_seconds, fail_at_step
        self._episode, self._step, self._total = -1, 0, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._episode, self._step = self._episode + 1, 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self._seconds:
            time.sleep(self._seconds)
        self._total += 1
        if self._total == self._fail_at:
            raise RuntimeError(f"CountingEnv fails at step {self._total}, as configured")
        self._step += 1
        over = self._step == self._length
        end = (over and self._end == "terminate", over and self._end == "truncate")
        return self._observation(), float(self._step), *end, {}

    def _observation(self) -> np.ndarray:
        return np.array([self._episode, self._step], np.float32)


class TrivialState(NamedTuple):
    """Training state of `TrivialAgent`; the counters are what a test can add up on its own.

    Attributes:
      params: the policy.
      updates: int32; calls of `update`.
      steps: int32; valid steps in all batches so far, over all devices.
      lag: float32; sum over updates of the batch's mean lag.
    """

    params: PyTree
    updates: jax.Array
    steps: jax.Array
    lag: jax.Array


class TrivialAgent:
    """A linear softmax policy that follows the rewards of single steps by SGD; in plain JAX, for discrete actions."""

    class Config(AgentConfig):
        """`learning_rate` of SGD; with `memory` the recurrent state counts the steps of the episode, int32 `[B]`."""

        learning_rate: float = 0.01
        memory: bool = False

    def __init__(self, config: Config, env_spec: EnvSpec) -> None:
        if not isinstance(env_spec.action, DiscreteActions):
            raise ValueError(f"TrivialAgent takes discrete actions only; {env_spec.name} has {env_spec.action}")
        self.config = config
        self._num_inputs = sum(int(np.prod(spec.shape)) for spec in jax.tree.leaves(env_spec.observation))
        self._num_actions = env_spec.action.num_values

    def init(self, rng: jax.Array) -> TrivialState:
        weights = 0.01 * jax.random.normal(rng, (self._num_inputs, self._num_actions), jnp.float32)
        params = {"weights": weights, "bias": jnp.zeros(self._num_actions, jnp.float32)}
        return TrivialState(params, jnp.int32(0), jnp.int32(0), jnp.float32(0))

    def actor_params(self, train_state: TrivialState) -> PyTree:
        return train_state.params

    def to_fuse(self, train_state: TrivialState) -> Fused:
        return Fused(train_state.params, train_state.steps)

    def with_fused(self, train_state: TrivialState, fused: Fused) -> TrivialState:
        return train_state._replace(params=fused.params, steps=fused.statistics)

    def initial_state(self, batch_size: int) -> PyTree:
        return jnp.zeros(batch_size, jnp.int32) if self.config.memory else ()

    def act(
        self, params: PyTree, rng: jax.Array, observation: PyTree, is_first: jax.Array, state: PyTree
    ) -> tuple[jax.Array, PyTree, PyTree]:
        log_probs = self._log_probs(params, observation, is_first.ndim)
        action = jax.random.categorical(rng, log_probs).astype(jnp.int32)
        log_prob = jnp.take_along_axis(log_probs, action[..., None], -1)[..., 0]
        if self.config.memory:
            state = jnp.where(is_first, 0, state) + 1
        return action, {"log_prob": log_prob}, state

    def update(
        self, train_state: TrivialState, batch: Batch, rng: jax.Array, axis_name: str
    ) -> tuple[TrivialState, Metrics]:
        gradient, metrics = jax.grad(self._loss, has_aux=True)(train_state.params, batch)
        gradient = jax.lax.pmean(gradient, axis_name)
        params = jax.tree.map(lambda p, g: p - self.config.learning_rate * g, train_state.params, gradient)
        steps = jax.lax.psum(jnp.sum(batch.trajectory.valid, dtype=jnp.int32), axis_name)
        lag = jax.lax.pmean(jnp.mean(batch.lag.astype(jnp.float32)), axis_name)
        state = TrivialState(params, train_state.updates + 1, train_state.steps + steps, train_state.lag + lag)
        return state, {**metrics, "lag": lag}

    def _loss(self, params: PyTree, batch: Batch) -> tuple[jax.Array, Metrics]:
        """REINFORCE with the importance-weighted reward of each step in place of the return."""
        trajectory = batch.trajectory
        observation = jax.tree.map(lambda x: x[:-1], trajectory.observation)
        log_probs = self._log_probs(params, observation, trajectory.action.ndim)
        log_prob = jnp.take_along_axis(log_probs, trajectory.action[..., None], -1)[..., 0]
        log_ratio = jnp.where(trajectory.valid, log_prob - trajectory.extras["log_prob"], 0)
        ratio = jax.lax.stop_gradient(jnp.exp(jnp.minimum(log_ratio, 0)))  # truncated at 1
        loss = -jnp.mean(batch.weight * ratio * trajectory.reward * log_prob)
        return loss, {"loss": loss, "importance_weight": jnp.mean(batch.weight * ratio)}

    def _log_probs(self, params: PyTree, observation: PyTree, batch_dims: int) -> jax.Array:
        leaves = jax.tree.leaves(observation)
        flat = [x.reshape(*x.shape[:batch_dims], -1).astype(jnp.float32) for x in leaves]
        inputs = jnp.concatenate(flat, -1)
        inputs = inputs / (1 + jnp.abs(inputs))  # counters and pixels alike end up between -1 and 1
        return jax.nn.log_softmax(inputs @ params["weights"] + params["bias"])
