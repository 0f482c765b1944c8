"""The promises of a whole run, with real threads, processes and sockets."""

import time
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from short_runs import cartpole_config, counting_config, train, values
from tianji_jax.actor import acting_spec, actor_key
from tianji_jax.agent import Metrics
from tianji_jax.blueprint import plan
from tianji_jax.device_queue import Shard
from tianji_jax.environments import make
from tianji_jax.learner import init_state, update_step
from tianji_jax.parallel import Parallel
from tianji_jax.testing import CountingEnv, TrivialAgent
from tianji_jax.types import ArraySpec, Batch, Trajectory, trajectory_spec

COUNTS = ("consumed", "dropped", "rejected", "queued")


class JitteryEnv(CountingEnv):
    """Sleeps for random times, so that actors overtake each other."""

    def __init__(self, most_seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self._most_seconds = most_seconds
        self._random = np.random.default_rng()

    def step(self, action: int) -> Any:
        time.sleep(self._random.exponential(self._most_seconds))
        return super().step(action)


class LagWatcher(TrivialAgent):
    """Keeps the largest and smallest lag that any update was given."""

    def init(self, rng: jax.Array) -> Any:
        return super().init(rng), jnp.int32(0), jnp.int32(0)

    def actor_params(self, train_state: Any) -> Any:
        return super().actor_params(train_state[0])

    def update(self, train_state: Any, batch: Batch, rng: jax.Array, axis_name: str) -> tuple[Any, Metrics]:
        inner, most, least = train_state
        inner, metrics = super().update(inner, batch, rng, axis_name)
        most = jnp.maximum(most, jax.lax.pmax(jnp.max(batch.lag), axis_name))
        least = jnp.minimum(least, jax.lax.pmin(jnp.min(batch.lag), axis_name))
        return (inner, most, least), metrics


def assert_account_balances(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["trajectories_received"] == sum(report[f"trajectories_{name}"] for name in COUNTS)


def assert_same(actual: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    max_lag=st.integers(0, 3),
    trajectories=st.integers(1, 3),
    actors=st.integers(1, 4),
    max_reuse=st.integers(0, 2),
    capacity=st.integers(1, 3),
)
def test_nothing_older_than_max_lag_reaches_an_update(
    tmp_path: Path, max_lag: int, trajectories: int, actors: int, max_reuse: int, capacity: int
) -> None:
    config = counting_config(
        tmp_path,
        {
            "run": {"environment_steps": 1500},
            "environment": {"name": f"{__name__}:JitteryEnv", "options": {"most_seconds": 3e-4}},
            "actors": {"count": actors},
            "staleness": {"max_lag": max_lag},
            "balance": {"max_reuse": max_reuse, "min_ess": 0},
            "learner": {"trajectories_per_update": trajectories, "queue_capacity": capacity},
            "agent": {"name": f"{__name__}:LagWatcher"},
        },
    )
    result, reports = train(config)
    inner, most, least = result.train_state
    assert 0 <= least <= most <= max_lag
    assert int(inner.updates) == result.learner_steps
    assert max(report.get("policy_lag_max", 0) for report in reports) == most
    assert_account_balances(reports)
    # What the agent saw is what was counted as consumed.
    consumed = reports[-1]["trajectories_consumed"]
    assert consumed % trajectories == 0
    reuses = result.learner_steps - consumed // trajectories
    assert 0 <= reuses <= max_reuse * consumed // trajectories
    assert (reports[-1]["samples_reused"] > 0) == (reuses > 0)


def test_stragglers_are_dropped_and_counted_not_learned_from(tmp_path: Path) -> None:
    """Two versions pass while the slow actor acts once; with max_lag 0 its trajectories come too late."""
    config = counting_config(
        tmp_path,
        {
            "run": {"environment_steps": 3000},
            "environment": {"name": f"{__name__}:JitteryEnv", "options": {"most_seconds": 1e-3}},
            "actors": {"count": 4, "double_buffered": False},
            "staleness": {"max_lag": 1},
            "agent": {"name": f"{__name__}:LagWatcher"},
        },
    )
    result, reports = train(config)
    assert reports[-1]["trajectories_dropped"] > 0
    assert result.train_state[1] <= 1
    assert_account_balances(reports)


class Synchronous:
    """Act, then learn, one after the other, written without any part of the pipeline."""

    def __init__(self, config: Any) -> None:
        blueprint = plan(config)
        self.agent, self.config = blueprint.agent, config
        self.parallel = Parallel(jax.devices()[:1], "pmap")
        self.state = self.parallel.init(lambda: init_state(self.agent, config.run.seed))
        _, extras, recurrent = acting_spec(self.agent, blueprint.env_spec.observation)
        actors = config.actors
        self.spec = trajectory_spec(blueprint.env_spec, actors.unroll_length, actors.environments, extras, recurrent)
        shard = Shard(self.spec, ArraySpec((actors.environments,), np.int32))
        self.step = self.parallel.lower(
            update_step(self.agent, config.staleness), self.parallel.spec(self.state), shard
        ).compile()
        self.act = jax.jit(self.agent.act)
        self.key, self.calls = actor_key(config.run.seed, 0), 0
        half = actors.environments // 2
        self.pools = [
            make(config.environment.name, config.environment.options, num_environments=half, seed=start, threads=1)
            for start in (config.run.seed * actors.environments, config.run.seed * actors.environments + half)
        ]
        self.now = [pool.reset() for pool in self.pools]
        self.memory = [self.agent.initial_state(half) for _ in self.pools]

    def unroll(self) -> Trajectory:
        params = self.agent.actor_params(self.state.train_state)
        start = jax.tree.map(lambda *x: np.concatenate(x), *self.memory)
        rows: list[list[Any]] = [[], []]
        for _ in range(self.config.actors.unroll_length):
            for index, pool in enumerate(self.pools):
                before, memory = self.now[index], self.memory[index]
                key = jax.random.fold_in(self.key, self.calls)
                action, extras, self.memory[index] = self.act(params, key, before.observation, before.is_first, memory)
                self.calls += 1
                self.now[index] = after = pool.step(np.asarray(action))
                rows[index].append((before, np.asarray(action), jax.tree.map(np.asarray, extras), after))

        def stack(pick: Any) -> Any:
            halves = [jax.tree.map(lambda *x: np.stack(x), *[pick(row) for row in half]) for half in rows]
            return jax.tree.map(lambda *x: np.concatenate(x, axis=1), *halves)

        last = jax.tree.map(lambda *x: np.concatenate(x)[None], *[step.observation for step in self.now])
        first = np.concatenate([step.is_first for step in self.now])[None]
        return Trajectory(
            observation=jax.tree.map(lambda a, b: np.concatenate([a, b]), stack(lambda row: row[0].observation), last),
            is_first=np.concatenate([stack(lambda row: row[0].is_first), first]),
            action=stack(lambda row: row[1]),
            reward=stack(lambda row: row[3].reward),
            terminated=stack(lambda row: row[3].terminated),
            truncated=stack(lambda row: row[3].truncated),
            valid=stack(lambda row: row[3].valid),
            extras=stack(lambda row: row[2]),
            state=start,
        )

    def run(self, updates: int) -> Any:
        for version in range(updates):
            trajectory = self.unroll()
            versions = np.full(self.config.actors.environments, version, np.int32)
            self.state, _ = self.step(self.state, self.parallel.shard([Shard(trajectory, versions)]))
        for pool in self.pools:
            pool.close()
        return jax.device_get(self.state.train_state)


@pytest.mark.parametrize("recurrence", [pytest.param("none", marks=pytest.mark.slow), "gru"])
def test_max_lag_0_is_the_synchronous_loop(tmp_path: Path, recurrence: str) -> None:
    network = {"hidden_sizes": [8], "recurrence": recurrence, "recurrent_size": 8}
    config = cartpole_config(
        tmp_path,
        {
            "run": {"environment_steps": 1000, "seed": 3},
            "actors": {"double_buffered": True},
            "staleness": {"max_lag": 0},
            "agent": {"name": "ppo", "network": network, "minibatches": 2, "normalise_observations": True},
        },
    )
    result, reports = train(config)
    assert max(values(reports, "policy_lag_max")) == 0
    expected = Synchronous(config).run(result.learner_steps)
    assert result.learner_steps >= 7
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), result.train_state, expected)


@pytest.mark.parametrize("max_lag", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_lock_step_repeats_bit_for_bit_in_threads_and_in_processes(tmp_path: Path, max_lag: int) -> None:
    def run(placement: str) -> Any:
        config = cartpole_config(
            tmp_path,
            {
                "run": {"environment_steps": 3000, "deterministic": True},
                "actors": {"count": 3, "placement": placement, "environments": 4},
                "staleness": {"max_lag": max_lag},
                "learner": {"trajectories_per_update": 2},
            },
        )
        result, reports = train(config)
        assert reports[-1]["trajectories_dropped"] == reports[-1]["trajectories_rejected"] == 0
        assert max(values(reports, "policy_lag_max")) == max_lag
        return result

    first, second, third = run("thread"), run("thread"), run("process")
    assert first.environment_steps == second.environment_steps == third.environment_steps
    assert_same(second.train_state, first.train_state)
    assert_same(third.train_state, first.train_state)


def test_several_devices_and_both_programs_train(tmp_path: Path) -> None:
    for mode in ("pmap", "shard_map"):
        config = cartpole_config(tmp_path, {"learner": {"devices": 2, "parallel": mode}})
        result, reports = train(config)
        assert result.environment_steps >= 400
        assert_account_balances(reports)


def test_a_run_leaves_its_folder_and_says_what_it_did(tmp_path: Path) -> None:
    config = counting_config(tmp_path, {"run": {"name": "first"}})
    result, reports = train(config)
    assert result.path == tmp_path / "first"
    assert (result.path / "config.yaml").exists()
    # Episodes of 5 steps give 15, and the step that resets is no step.
    assert result.episode_return == 15
    assert reports[-1]["episode_length"] == 5
    assert reports[-1]["environment_steps"] == result.environment_steps >= 400
    assert int(result.train_state.steps) == result.environment_steps
    expected = {
        "wall_seconds", "environment_steps", "frames", "learner_steps", "policy_version", "episodes", "episode_return",
        "environment_steps_per_second", "learner_steps_per_second", "policy_lag_min", "policy_lag_mean",
        "policy_lag_max", "samples_corrected", "device_queue_fill", *(f"trajectories_{name}" for name in COUNTS),
    }  # fmt: skip
    assert expected <= {name for report in reports for name in report}
    assert reports[-1]["policy_version"] == reports[-1]["learner_steps"]
    assert [r["environment_steps"] for r in reports] == sorted(r["environment_steps"] for r in reports)


def test_a_run_without_a_finished_episode_reports_no_return(tmp_path: Path) -> None:
    result, reports = train(counting_config(tmp_path, {"environment": {"options": {"episode_length": 1000}}}))
    assert result.episode_return is None
    assert all("episode_return" not in report for report in reports)


def test_a_run_ends_at_the_return_asked_for_over_full_100_episodes(tmp_path: Path) -> None:
    config = counting_config(tmp_path, {"run": {"environment_steps": 100_000, "stop_at_return": 15}})
    result, reports = train(config)
    assert result.solved
    assert 100 <= reports[-1]["episodes"] < 200


def test_gymnasium_environments_train(tmp_path: Path) -> None:
    assert "Acrobot-v1" in gymnasium.registry
    config = cartpole_config(tmp_path, {"environment": {"name": "gymnasium:Acrobot-v1"}, "actors": {"environments": 2}})
    result, _ = train(config)
    assert result.environment_steps >= 400


def test_environments_that_take_long_to_make_trip_nothing(tmp_path: Path) -> None:
    config = counting_config(
        tmp_path, {"environment": {"options": {"make_seconds": 1.5}}, "actors": {"environments": 2}}
    )
    result, reports = train(config)
    assert result.environment_steps >= 400
    assert reports[0]["environment_steps"] == 0
