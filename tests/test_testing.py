"""The fakes keep their promises."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tianji_jax import environments
from tianji_jax.testing import CountingEnv, TrivialAgent
from tianji_jax.types import DATA_AXIS, ArraySpec, Batch, ContinuousActions, DiscreteActions, EnvSpec, Trajectory

T, B = 4, 3
SPEC = EnvSpec("test", {"a": ArraySpec((2,), np.dtype(np.float32)), "b": ArraySpec((), np.dtype(np.uint8))},
               DiscreteActions(3))  # fmt: skip


def test_counting_env_counts() -> None:
    env = CountingEnv(episode_length=3, end="truncate")
    for episode in range(2):
        observation, _ = env.reset()
        np.testing.assert_array_equal(observation, [episode, 0])
        for step in range(1, 4):
            observation, reward, terminated, truncated, _ = env.step(0)
            np.testing.assert_array_equal(observation, [episode, step])
            assert (reward, terminated, truncated) == (step, False, step == 3)
    envs = environments.make("tianji_jax.testing:CountingEnv", {"episode_length": 5}, 2, seed=0, threads=1)
    envs.reset()
    for _ in range(5):
        step = envs.step(np.zeros(2, np.int32))
    assert step.episodes == [(15.0, 5), (15.0, 5)]


def test_counting_env_sleeps_and_fails_as_told() -> None:
    start = time.monotonic()
    env = CountingEnv(make_seconds=0.05, step_seconds=0.02, fail_at_step=3)
    assert time.monotonic() - start >= 0.05
    env.reset()
    start = time.monotonic()
    env.step(0)
    env.step(0)
    assert time.monotonic() - start >= 0.04
    with pytest.raises(RuntimeError, match="fails at step 3"):
        env.step(0)
    with pytest.raises(ValueError, match="episode_length=0"):
        CountingEnv(episode_length=0)
    with pytest.raises(ValueError, match="end='stop'"):
        CountingEnv(end="stop")  # type: ignore[arg-type]


def agent(**settings: Any) -> TrivialAgent:
    return TrivialAgent(TrivialAgent.Config(**settings), SPEC)


def batch(seed: int, valid: np.ndarray) -> Batch:
    rng = np.random.default_rng(seed)
    flag = np.zeros((T, B), bool)
    trajectory = Trajectory(
        observation={
            "a": rng.normal(size=(T + 1, B, 2)).astype(np.float32),
            "b": rng.integers(0, 255, (T + 1, B)).astype(np.uint8),
        },
        is_first=np.zeros((T + 1, B), bool),
        action=rng.integers(0, 3, (T, B)).astype(np.int32),
        reward=rng.normal(size=(T, B)).astype(np.float32),
        terminated=flag,
        truncated=flag,
        valid=valid,
        extras={"log_prob": np.log(rng.uniform(0.1, 0.6, (T, B))).astype(np.float32)},
        state=(),
    )
    weight = (valid / valid.mean()).astype(np.float32)
    return Batch(trajectory, np.array([0, 1, 2], np.int32), np.array([False, True, True]), weight)


def update(one: TrivialAgent, state: Any, shards: list[Batch]) -> tuple[Any, Any]:
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *shards)
    rngs = jax.random.split(jax.random.key(0), len(shards))
    step = jax.vmap(lambda b, r: one.update(state, b, r, DATA_AXIS), axis_name=DATA_AXIS, axis_size=len(shards))
    return step(stacked, rngs)


def test_act_gives_the_log_prob_of_what_it_sampled() -> None:
    one = agent()
    params = one.actor_params(one.init(jax.random.key(1)))
    params = {"weights": 30 * params["weights"], "bias": jnp.array([0.0, 1.0, -1.0])}
    observation = {"a": np.tile(np.float32([1, -3]), (4000, 1)), "b": np.full(4000, 200, np.uint8)}
    action, extras, state = one.act(params, jax.random.key(0), observation, np.zeros(4000, bool), ())
    assert (action.shape, action.dtype, state) == ((4000,), np.int32, ())
    inputs = np.array([1 / 2, -3 / 4, 200 / 201])
    logits = inputs @ np.asarray(params["weights"], np.float64) + np.array([0.0, 1.0, -1.0])
    probability = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(np.exp(extras["log_prob"]), probability[np.asarray(action)], rtol=1e-4)
    np.testing.assert_allclose(np.bincount(action, minlength=3) / 4000, probability, atol=0.04)


def test_memory_counts_the_steps_of_the_episode() -> None:
    one = agent(memory=True)
    params, state = one.actor_params(one.init(jax.random.key(1))), one.initial_state(2)
    observation = {"a": np.zeros((2, 2), np.float32), "b": np.zeros(2, np.uint8)}
    counts = []
    for first in [(True, True), (False, False), (False, True), (False, False)]:
        _, _, state = one.act(params, jax.random.key(0), observation, np.array(first), state)
        counts.append(state.tolist())
    assert counts == [[1, 1], [2, 2], [3, 1], [4, 2]]


def test_update_counts_and_agrees_between_devices() -> None:
    one, rng = agent(), np.random.default_rng(7)
    state = one.init(jax.random.key(0))
    shards = [batch(seed, rng.random((T, B)) < 0.7) for seed in (1, 2)]
    valid = sum(int(shard.trajectory.valid.sum()) for shard in shards)
    for number in (1, 2):
        states, metrics = update(one, state, shards)
        assert all(jnp.array_equal(x[0], x[1]) for x in jax.tree.leaves(states))
        state = jax.tree.map(lambda x: x[0], states)
        assert (int(state.updates), int(state.steps), float(state.lag)) == (number, number * valid, number * 1.0)
    assert all(value.dtype == np.float32 for value in metrics.values())


def test_update_descends_its_loss_and_ignores_invalid_steps() -> None:
    one = agent(learning_rate=0.1)
    valid = np.ones((T, B), bool)
    valid[2, 1] = False
    data = batch(1, valid)
    state = one.init(jax.random.key(0))

    def loss(params: Any) -> float:
        total = 0.0
        for t, b in zip(*np.nonzero(valid), strict=True):
            raw = np.array([*data.trajectory.observation["a"][t, b], data.trajectory.observation["b"][t, b]], float)
            logits = raw / (1 + abs(raw)) @ params["weights"] + params["bias"]
            log_prob = (logits - np.log(np.exp(logits).sum()))[data.trajectory.action[t, b]]
            total -= ratios[t, b] * data.trajectory.reward[t, b] * log_prob
        return total / valid.sum()

    params = jax.tree.map(lambda x: np.asarray(x, np.float64), state.params)
    ratios = np.zeros((T, B))
    for t, b in np.ndindex(T, B):
        raw = np.array([*data.trajectory.observation["a"][t, b], data.trajectory.observation["b"][t, b]], float)
        logits = raw / (1 + abs(raw)) @ params["weights"] + params["bias"]
        probability = (np.exp(logits) / np.exp(logits).sum())[data.trajectory.action[t, b]]
        ratios[t, b] = min(probability / np.exp(data.trajectory.extras["log_prob"][t, b]), 1)
    states, metrics = update(one, state, [data])
    np.testing.assert_allclose(metrics["loss"][0], loss(params), rtol=1e-5)
    for name, index in [("bias", (0,)), ("bias", (2,)), ("weights", (0, 1)), ("weights", (2, 2))]:
        moved = {key: value.copy() for key, value in params.items()}
        moved[name][index] += 1e-4
        slope = (loss(moved) - loss(params)) / 1e-4
        change = float(states.params[name][0][index] - state.params[name][index])
        np.testing.assert_allclose(change, -0.1 * slope, rtol=1e-2, atol=1e-5)
    # What stands at an invalid step has no say, not even an impossible log-probability.
    data.trajectory.extras["log_prob"][2, 1] = -200
    data.trajectory.reward[2, 1] = 1e6
    again, _ = update(one, state, [data])
    assert all(jnp.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (states, again)), strict=True))


def test_update_compiles_once() -> None:
    one, traces = agent(), []

    def step(state: Any, data: Batch, rng: jax.Array) -> Any:
        traces.append(1)
        return one.update(state, data, rng, DATA_AXIS)

    compiled = jax.jit(jax.vmap(step, axis_name=DATA_AXIS))
    state = jax.tree.map(lambda x: jnp.asarray(x)[None], one.init(jax.random.key(0)))
    for seed in range(3):
        data = jax.tree.map(lambda x: x[None], batch(seed, np.ones((T, B), bool)))
        state, _ = compiled(state, data, jax.random.split(jax.random.key(seed), 1))
    assert len(traces) == 1
    assert state.updates.dtype == np.int32


def test_agent_refuses_continuous_actions() -> None:
    spec = EnvSpec("test", ArraySpec((2,), np.dtype(np.float32)), ContinuousActions((-1.0,), (1.0,)))
    with pytest.raises(ValueError, match="discrete actions only"):
        TrivialAgent(TrivialAgent.Config(), spec)
