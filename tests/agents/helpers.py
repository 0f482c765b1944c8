"""Specs, real trajectories of a toy environment, and updates on virtual devices, for the agents' tests."""

from typing import Any

import jax
import numpy as np

from tianji_jax.agents.impala import IMPALA
from tianji_jax.agents.ppo import PPO
from tianji_jax.types import (
    ArraySpec,
    Batch,
    ContinuousActions,
    DiscreteActions,
    EnvSpec,
    MultiDiscreteActions,
    Trajectory,
)

VECTOR, IMAGE = ArraySpec((4,), np.float32), ArraySpec((2, 12, 14), np.uint8)
BOUNDED = ContinuousActions((-1.0, 0.0), (1.0, 5.0))
MASKED = {"info": ArraySpec((3, 2), np.float32), "mask": ArraySpec((5,), np.int32), "screen": IMAGE}

SPECS = {
    "vector": EnvSpec("vector", VECTOR, DiscreteActions(2)),
    "image": EnvSpec("image", IMAGE, MultiDiscreteActions((2, 3))),
    "continuous": EnvSpec("continuous", VECTOR, BOUNDED),
    "masked": EnvSpec("masked", MASKED, DiscreteActions(5), action_mask="mask"),
    "masked_multi": EnvSpec("masked_multi", MASKED, MultiDiscreteActions((2, 3)), action_mask="mask"),
}
AGENTS = {"ppo": PPO, "impala": IMPALA}


def make_agent(name: str, spec: str = "vector", **settings: Any) -> Any:
    agent = AGENTS[name]
    return agent(agent.Config(**settings), SPECS[spec])


def random_observation(spec: Any, leading: tuple[int, ...], rng: np.random.Generator) -> Any:
    if isinstance(spec, dict):
        return {name: random_observation(s, leading, rng) for name, s in spec.items()}
    if spec.dtype == np.uint8:
        return rng.integers(0, 256, (*leading, *spec.shape), np.uint8)
    if spec.dtype == np.int32:  # an action mask; the second and last values are always allowed
        mask = rng.integers(0, 2, (*leading, *spec.shape), np.int32)
        mask[..., [1, -1]] = 1
        return mask
    return (3 + 2 * rng.normal(size=(*leading, *spec.shape))).astype(np.float32)


def rollout(agent: Any, params: Any, steps: int, environments: int, seed: int = 0) -> Batch:
    """Act `steps` times, one step at a time, on random observations with episode ends and the resets after them."""
    rng = np.random.default_rng(seed)
    observation = random_observation(agent.env_spec.observation, (steps + 1, environments), rng)
    done = rng.random((steps, environments)) < 0.15
    valid = np.ones((steps, environments), bool)
    is_first = np.zeros((steps + 1, environments), bool)
    for t in range(1, steps):
        valid[t] = ~(done[t - 1] & valid[t - 1])
        is_first[t + 1] = ~valid[t]
    done &= valid
    terminated = done & (rng.random(done.shape) < 0.5)

    act = jax.jit(agent.act)
    state = jax.tree.map(lambda s: s + 0.3, agent.initial_state(environments))  # in the midst of episodes
    start, taken = state, []
    for t in range(steps):
        now = jax.tree.map(lambda x: x[t], observation)  # noqa: B023
        key = jax.random.fold_in(jax.random.key(seed), t)
        action, extras, state = act(params, key, now, is_first[t], state)
        taken.append((action, extras))
    action, extras = jax.tree.map(lambda *x: np.stack(x), *taken)
    reward = rng.normal(size=(steps, environments)).astype(np.float32)
    trajectory = Trajectory(
        observation, is_first, action, reward, terminated, done & ~terminated, valid, extras, jax.device_get(start)
    )
    return Batch(
        trajectory,
        lag=np.zeros(environments, np.int32),
        stale=np.zeros(environments, bool),
        weight=(valid / valid.mean()).astype(np.float32),
    )


def split(x: Any, devices: int, axis: int = 0) -> np.ndarray:
    """`[D, ...]`: an axis dealt to the devices."""
    return np.stack(np.split(np.asarray(x), devices, axis=axis))


def split_trajectory(trajectory: Trajectory, devices: int) -> Trajectory:
    """`[D, ...]` arrays: the environments dealt to the devices."""
    parts = jax.tree.map(lambda x: split(x, devices, 1), trajectory._replace(state=()))
    return parts._replace(state=jax.tree.map(lambda x: split(x, devices), trajectory.state))


def shard(batch: Batch, devices: int) -> Batch:
    """`[D, ...]` arrays: the environments dealt to the devices."""
    lag, stale = split(batch.lag, devices), split(batch.stale, devices)
    return Batch(split_trajectory(batch.trajectory, devices), lag, stale, split(batch.weight, devices, 1))


class Learner:
    """The agent's update under pmap on some virtual devices; counts how often it is traced."""

    def __init__(self, agent: Any, devices: int = 1) -> None:
        self.devices, self.traces, self._agent = devices, 0, agent
        self._update = jax.pmap(
            self._traced,
            axis_name="data",
            in_axes=(None, 0, 0),
            out_axes=(None, None),
            devices=jax.devices()[:devices],
        )

    def _traced(self, state: Any, batch: Batch, rng: jax.Array) -> Any:
        self.traces += 1
        state, metrics = self._agent.update(state, batch, rng, "data")
        return state, jax.lax.pmean(metrics, "data")

    def update(self, state: Any, batch: Batch, seed: int = 0) -> tuple[Any, dict[str, np.ndarray]]:
        rngs = jax.random.split(jax.random.key(seed), self.devices)
        return jax.device_get(self._update(state, shard(batch, self.devices), rngs))


def assert_close(a: Any, b: Any, **tolerances: float) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerances), a, b)
