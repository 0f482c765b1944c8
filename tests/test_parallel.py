"""pmap and shard_map on 1, 2 and 4 devices: one program, the same numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tianji_jax.actor import acting_spec
from tianji_jax.agents.impala import IMPALA
from tianji_jax.agents.ppo import PPO
from tianji_jax.config import ConfigError, LearnerConfig, StalenessConfig
from tianji_jax.device_queue import Arrival, BatchAssembler
from tianji_jax.environments import make_spec
from tianji_jax.learner import LearnerState, first_params, init_state, update_step
from tianji_jax.parallel import Parallel, actor_device, learner_devices
from tianji_jax.types import ArraySpec, Stamp, Trajectory, trajectory_spec

T, B = 5, 8
SGD: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.1, "max_gradient_norm": None}
AGENTS = {
    "impala": IMPALA(IMPALA.Config(**SGD), make_spec("envpool:CartPole-v1", {})),
    # One minibatch: with several, each device shuffles its own shard.
    "ppo": PPO(PPO.Config(**SGD, epochs=1, minibatches=1), make_spec("envpool:CartPole-v1", {})),
    "recurrent": IMPALA(IMPALA.Config(**SGD, network={"recurrence": "lstm"}), make_spec("envpool:CartPole-v1", {})),
}


def make_arrivals(agent: Any, spec: Trajectory, count: int) -> list[Arrival]:
    rng = np.random.default_rng(0)

    def fill(s: Any) -> np.ndarray:
        if s.dtype == bool:
            return rng.random(s.shape) < 0.2
        if s.dtype == np.int32:
            return rng.integers(0, 2, s.shape).astype(np.int32)
        return rng.normal(size=s.shape).astype(np.float32)

    arrivals = []
    for n in range(count):
        trajectory = jax.tree.map(fill, spec)
        # Uneven shards: invalid steps are many in some environments, none in others.
        valid = rng.random((T, B)) > np.linspace(0, 0.8, B)
        trajectory = trajectory._replace(valid=valid, truncated=trajectory.truncated & ~trajectory.terminated)
        arrivals.append(Arrival(Stamp(-n, 0, n), trajectory, [], int(valid.sum())))
    return arrivals


def updated(agent: Any, devices: int, mode: Any, updates: int = 2) -> tuple[LearnerState, Any]:
    parallel = Parallel(jax.devices()[:devices], mode)
    _, extras, state = acting_spec(agent, agent.env_spec.observation)
    spec = trajectory_spec(agent.env_spec, T, B, extras, state)
    assembler = BatchAssembler(spec, 2, devices)
    learner = parallel.init(lambda: init_state(agent, 0))
    staleness = StalenessConfig(fresh_lag=0, max_lag=4)
    step = parallel.lower(update_step(agent, staleness), parallel.spec(learner), assembler.shard_spec(spec)).compile()
    arrivals = make_arrivals(agent, spec, 2 * updates)
    for index in range(updates):
        shards = parallel.shard(assembler.assemble(arrivals[2 * index : 2 * index + 2]))
        learner, outputs = step(learner, shards)
        jax.block_until_ready(learner)
    return learner, outputs


def assert_close(actual: Any, expected: Any, **tolerance: float) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), **tolerance), actual, expected)


@pytest.mark.parametrize("name", ["recurrent", "ppo", pytest.param("impala", marks=pytest.mark.slow)])
def test_pmap_shard_map_and_any_number_of_devices_agree(name: str) -> None:
    agent = AGENTS[name]
    expected, outputs = updated(agent, 1, "pmap")
    initial = init_state(agent, 0).train_state.params
    moved = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), expected.train_state.params, initial)
    assert max(jax.tree.leaves(moved)) > 1e-3
    # Compiling a recurrent network takes its time, and the plain ones have shown the rest.
    for devices in (4,) if name == "recurrent" else (1, 2, 4):
        for mode in ("pmap", "shard_map"):
            state, others = updated(agent, devices, mode)
            assert_close(state.train_state.params, expected.train_state.params, rtol=1e-5, atol=1e-6)
            assert_close(others.metrics["loss"], outputs.metrics["loss"], rtol=1e-5, atol=1e-6)
            assert int(state.version) == 2


@pytest.mark.parametrize("mode", ["pmap", "shard_map"])
def test_the_mean_gradient_is_the_gradient_of_the_mean(mode: Any) -> None:
    """One SGD step by hand: a factor of the number of devices would show."""
    parallel = Parallel(jax.devices()[:4], mode)
    data = np.arange(4, dtype=np.float32)

    def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        gradient = jax.lax.pmean(jax.grad(lambda w: jnp.mean(w * x))(state), "data")
        return state - gradient, gradient

    compiled = parallel.lower(step, parallel.spec(jnp.zeros(())), ArraySpec((1,), np.dtype(np.float32))).compile()
    state, gradient = compiled(parallel.replicate(np.float32(0)), parallel.shard([data[i : i + 1] for i in range(4)]))
    assert float(gradient) == pytest.approx(data.mean())
    assert float(state) == pytest.approx(-data.mean())


@pytest.mark.parametrize("mode", ["pmap", "shard_map"])
def test_published_parameters_outlive_the_next_update(mode: Any) -> None:
    """The state is donated: what is handed to the publisher must be buffers of its own."""
    agent = AGENTS["impala"]
    parallel = Parallel(jax.devices()[:2], mode)
    _, extras, state = acting_spec(agent, agent.env_spec.observation)
    spec = trajectory_spec(agent.env_spec, T, B, extras, state)
    assembler = BatchAssembler(spec, 1, 2)
    learner = parallel.init(lambda: init_state(agent, 0))
    step = parallel.lower(
        update_step(agent, StalenessConfig()), parallel.spec(learner), assembler.shard_spec(spec)
    ).compile()
    shards = parallel.shard(assembler.assemble(make_arrivals(agent, spec, 1)))
    initial = first_params(agent, learner)
    before = jax.tree.map(np.array, initial)
    learner, first = step(learner, shards)
    kept = jax.tree.map(np.array, first.params)
    learner, second = step(learner, shards)
    jax.block_until_ready(learner)
    assert_close(initial, before, rtol=0)
    assert_close(first.params, kept, rtol=0)
    assert not np.array_equal(jax.tree.leaves(first.params)[1], jax.tree.leaves(second.params)[1])


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"learner.devices: 9 asked for, but there are \d+ cpu devices"):
        learner_devices(LearnerConfig(devices=9))
    if jax.default_backend() == "cpu":
        with pytest.raises(ConfigError, match=r"learner.platform: gpu asked for, but JAX finds only cpu"):
            learner_devices(LearnerConfig(platform="gpu"))


def test_actors_take_turns_on_accelerators_and_share_the_cpu() -> None:
    devices = jax.devices()[:2]
    assert [actor_device("accelerator", devices, n) for n in range(3)] == [devices[0], devices[1], devices[0]]
    assert actor_device("cpu", devices, 1) == jax.local_devices(backend="cpu")[0]
