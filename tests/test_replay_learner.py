"""Whole runs that learn from replay: who waits for whom, what is told, saved and refused."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tianji_jax
from short_runs import counting_config, train, values
from test_train import assert_account_balances
from tianji_jax.agent import AgentConfig, Metrics, ReplaySpec
from tianji_jax.config import Config, ConfigError
from tianji_jax.evaluation import evaluate
from tianji_jax.export import export
from tianji_jax.rate_limiter import RateLimiter
from tianji_jax.testing import TrivialAgent, TrivialState
from tianji_jax.types import Sample

CAPACITY, MIN_SIZE = 2000, 100


class Boundless(gymnasium.Env[np.ndarray, np.ndarray]):
    """Takes any number."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,))


class Counter(TrivialAgent):
    """Acts as `TrivialAgent`; its first bias counts gradient steps."""

    class Config(AgentConfig):
        """`bad`: about every second gradient step is not finite; `seconds`: that each takes."""

        bad: bool = False
        seconds: float = 0.0
        memory: bool = False

    update = None  # type: ignore[assignment]
    replay = ReplaySpec()

    def learn(
        self, train_state: TrivialState, sample: Sample, rng: jax.Array, axis_name: str
    ) -> tuple[TrivialState, Metrics, jax.Array]:
        config: Any = self.config
        loss = jnp.zeros(())
        if config.bad:
            # The first device's draw decides: what is not finite on one is undone on all.
            first = jax.lax.axis_index(axis_name) == 0
            loss = jnp.where(first & (sample.observation[0, 0] % 2 == 0), jnp.nan, 0.0)
        if config.seconds:
            loss = jax.pure_callback(lambda x: time.sleep(config.seconds) or x, jax.ShapeDtypeStruct((), "f4"), loss)
        params = {**train_state.params, "bias": train_state.params["bias"].at[0].add(1.0)}
        train_state = train_state._replace(params=params, updates=train_state.updates + 1)
        return train_state, {"loss": loss}, 1.0 + sample.reward


def config(directory: Path, **overrides: dict[str, Any]) -> Config:
    replay = {"capacity": CAPACITY, "min_size": MIN_SIZE, "batch_size": 16, "samples_per_insert": 4.0}
    sections: dict[str, dict[str, Any]] = {
        "run": {"environment_steps": 3000},
        "actors": {"environments": 4, "unroll_length": 10},
        "replay": replay | overrides.pop("replay", {}),
        "agent": {"name": "test_replay_learner:Counter"},
    }
    return counting_config(directory, sections, overrides)


def assert_ratio_held(config: Config, reports: list[dict[str, Any]]) -> None:
    """In every report the samples are those of the inserted steps, within the tolerance."""
    replay, steps = config.replay, config.steps_per_update
    tolerance = replay.samples_per_insert * steps + replay.samples_per_update(1)
    # A report may see an insert or an update that is being counted.
    slack = tolerance
    checked = 0
    for report in reports:
        counted = report["environment_steps"] - replay.min_size
        if counted >= 0:
            checked += 1
            assert abs(replay.samples_per_insert * counted - report["samples"]) <= tolerance + slack
    assert checked > 3
    last = reports[-1]
    counted = last["environment_steps"] - replay.min_size
    assert abs(replay.samples_per_insert * counted - last["samples"]) <= tolerance
    assert last["samples_per_insert"] == pytest.approx(last["samples"] / counted)
    assert last["learner_steps"] * replay.samples_per_update(1) == last["samples"]


@pytest.mark.parametrize("placement", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_actors_that_are_ten_times_too_fast_wait_for_the_learner(tmp_path: Path, placement: str) -> None:
    # 0.2 s of updates for each insert.
    slow = {"name": "test_replay_learner:Counter", "seconds": 0.02}
    actors = {"environments": 4, "unroll_length": 10, "placement": placement}
    run = {"environment_steps": 1500, "report_every_seconds": 0.05}
    configured = config(tmp_path, agent=slow, actors=actors, run=run)
    _, reports = train(configured)
    assert_ratio_held(configured, reports)
    assert_account_balances(reports)
    last = reports[-1]
    # Both are waits for the learner: for it to insert, and for what it made.
    assert last["actor_time/credit"] + last["actor_time/parameters"] > 0.9
    assert last["trajectories_dropped"] == 0


@pytest.mark.parametrize("placement", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_learner_that_is_ten_times_too_fast_waits_for_the_actors(tmp_path: Path, placement: str) -> None:
    actors = {"environments": 4, "unroll_length": 10, "placement": placement}
    environment = {"options": {"episode_length": 5, "step_seconds": 5e-3}}
    configured = config(
        tmp_path, environment=environment, actors=actors, run={"environment_steps": 1000, "report_every_seconds": 0.05}
    )
    _, reports = train(configured)
    assert_ratio_held(configured, reports)
    last = reports[-1]
    assert last["dispatcher_time/waiting"] > 0.9
    assert last["actor_time/credit"] + last["actor_time/parameters"] < 0.1


@pytest.mark.parametrize(("devices", "parallel"), [(1, "pmap"), (4, "pmap"), (4, "shard_map")])
def test_what_is_told_of_a_run(tmp_path: Path, devices: int, parallel: str) -> None:
    learner = {"devices": devices, "parallel": parallel}
    replay = {"prioritised": True, "gradient_steps": 3}
    result, reports = train(config(tmp_path, learner=learner, replay=replay))
    last = reports[-1]
    assert last["replay_steps"] == CAPACITY
    assert last["replay_fill"] == 1.0
    assert values(reports, "replay_fill") == sorted(values(reports, "replay_fill"))
    # Rewards of the counting environment are 1 to 5; a priority is one more.
    assert all(2 <= priority <= 6 for priority in values(reports, "learner/priority"))
    assert all(0 < weight <= 1 for weight in values(reports, "learner/importance_weight"))
    assert all(age >= 0 for age in values(reports, "learner/sample_age"))
    assert values(reports, "learner/sample_age")[-1] > 3
    assert last["trajectories_consumed"] * 40 * 5 / 6 == pytest.approx(last["environment_steps"], rel=0.1)
    assert result.train_state.params["bias"][0] == pytest.approx(3 * last["learner_steps"], rel=0.01)
    assert int(result.train_state.updates) == 3 * last["learner_steps"]
    assert last["samples"] == 3 * 16 * last["learner_steps"]


def test_gradient_steps_that_are_not_finite_are_undone(tmp_path: Path) -> None:
    agent = {"name": "test_replay_learner:Counter", "bad": True}
    result, reports = train(config(tmp_path, agent=agent, learner={"max_bad_updates": 1000, "devices": 4}))
    last = reports[-1]
    assert 0 < last["updates_skipped"] < last["learner_steps"]
    assert int(result.train_state.updates) == last["learner_steps"] - last["updates_skipped"]


def test_steps_that_are_too_old_are_left_out(tmp_path: Path) -> None:
    _, reports = train(config(tmp_path, replay={"max_lag": 60}))
    assert 10 < max(values(reports, "learner/sample_age")) <= 60
    _, reports = train(config(tmp_path))
    assert max(values(reports, "learner/sample_age")) > 100


def resumed(configured: Config, path: Path) -> list[dict[str, Any]]:
    tianji_jax.train(configured, show=False, resume=path)
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_goes_on_fills_its_replay_before_it_updates(tmp_path: Path) -> None:
    result, before = train(config(tmp_path))
    after = resumed(config(tmp_path, run={"environment_steps": 4000}), result.path)[len(before) :]
    assert after[0]["learner_steps"] == before[-1]["learner_steps"]
    last, steps = after[-1], before[-1]["environment_steps"]
    inserted = last["environment_steps"] - steps
    made = last["learner_steps"] - before[-1]["learner_steps"]
    assert made * 16 == last["samples"]
    assert last["replay_steps"] == inserted
    assert abs(4 * (inserted - MIN_SIZE) - last["samples"]) <= 4 * 40 + 16


def test_a_replay_that_is_saved_is_there_again(tmp_path: Path) -> None:
    saved = {"save": True, "prioritised": True}
    result, before = train(config(tmp_path, replay=saved))
    configured = config(tmp_path, replay=saved, run={"environment_steps": 4000})
    reports = resumed(configured, result.path)
    after = reports[len(before) :]
    # It goes on at once, with the samples it had made, and with steps that are as old as before.
    assert after[-1]["samples"] * 1.0 == after[-1]["learner_steps"] * 16
    assert set(values(after, "replay_fill")) <= {0.0, 1.0}  # nothing before the learner begins
    assert_ratio_held(configured, [report for report in reports if report["samples"]])
    assert values(after, "learner/sample_age")[0] > 0.5 * values(before, "learner/sample_age")[-1]


def test_a_saved_replay_of_another_size_is_left_and_said_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result, before = train(config(tmp_path, replay={"save": True}))
    configured = config(tmp_path, replay={"save": True}, learner={"devices": 2}, run={"environment_steps": 4000})
    with caplog.at_level(logging.WARNING):
        after = resumed(configured, result.path)[len(before) :]
    assert "the replay begins empty" in caplog.text
    assert after[-1]["replay_steps"] == after[-1]["environment_steps"] - before[-1]["environment_steps"]


def test_counts_of_long_runs_survive() -> None:
    limiter = RateLimiter(1.0, 1, 1.0)
    limiter.counts = np.array([2**40, 2**41])
    assert (limiter.inserted, limiter.sampled) == (2**40, 2**41)
    assert limiter.counts.tolist() == [2**40, 2**41]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"replay": {"capacity": 39, "min_size": 10}}, "replay.capacity is 39, less than the 40 steps"),
        ({"replay": {"min_size": 3000}}, r"replay.min_size \(3,000\) must not exceed"),
        ({"replay": {"tolerance": 10.0}}, r"replay.tolerance is 10 .* need 160 or more"),
        ({"replay": {"capacity": 10**13}}, r"replay.capacity: 10,000,000,000,000 steps take .* at most"),
        ({"replay": {"batch_size": 15}, "learner": {"devices": 2}}, "replay.batch_size: 15 .* multiple of 2"),
        ({"run": {"deterministic": True}}, "run.deterministic: lock-step is for agents that learn as"),
        ({"balance": {"max_reuse": 1}}, "set balance.max_reuse=0"),
        (
            {"agent": {"name": "tianji_jax.testing:TrivialAgent"}},
            "replay: tianji_jax.testing:TrivialAgent learns from each trajectory as it comes",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, overrides: dict[str, dict[str, Any]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tianji_jax.train(config(tmp_path, **overrides), show=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "agent",
    [
        {"name": "dqn", "dueling": True, "epsilon_spread": 7.0, "network": {"hidden_sizes": [8]}},
        {"name": "r2d2", "burn_in": 3, "network": {"hidden_sizes": [8], "recurrence": "gru", "recurrent_size": 8}},
        pytest.param({"name": "dqn", "quantiles": 5, "network": {"hidden_sizes": [8]}}, marks=pytest.mark.slow),
    ],
    ids=["dqn", "r2d2", "quantiles"],
)
def test_values_are_evaluated_and_exported(tmp_path: Path, agent: dict[str, Any]) -> None:
    configured = config(
        tmp_path,
        environment={"name": "envpool:CartPole-v1", "options": {}},
        agent=agent,
        replay={"prioritised": True},
        run={"environment_steps": 1000},
    )
    result, reports = train(configured)
    path, last = result.path, reports[-1]
    steps_per_draw = 10 if agent["name"] == "r2d2" else 1
    assert last["samples"] == last["learner_steps"] * 16 * steps_per_draw
    for greedy in (False, True):
        assert len(evaluate(path, 5, greedy=greedy).returns) == 5
        assert (export(path, greedy=greedy) / "policy.jax").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sac", "td3"])
def test_a_control_policy_is_evaluated_and_exported(tmp_path: Path, name: str) -> None:
    configured = config(
        tmp_path,
        environment={"name": "envpool:Pendulum-v1", "options": {}},
        agent={"name": name, "network": {"hidden_sizes": [8]}},
        replay={"prioritised": True, "gradient_steps": 2},
    )
    result, reports = train(configured)
    assert values(reports, "learner/loss")
    assert int(result.train_state.steps) == 2 * reports[-1]["learner_steps"]
    evaluation = evaluate(result.path, 5, greedy=True)
    assert (evaluation.returns < 0).all()
    assert (export(result.path, greedy=name == "td3") / "policy.jax").is_file()


def test_a_burn_in_that_leaves_nothing_is_refused_before_anything_starts(tmp_path: Path) -> None:
    agent = {"name": "r2d2", "burn_in": 10, "network": {"recurrence": "gru"}}
    configured = config(tmp_path, environment={"name": "envpool:CartPole-v1", "options": {}}, agent=agent)
    with pytest.raises(ConfigError, match=r"agent\.burn_in is 10, .* less than actors\.unroll_length=10"):
        tianji_jax.train(configured, show=False)
    assert not list(tmp_path.iterdir())


def test_actions_without_bounds_are_refused_before_anything_starts(tmp_path: Path) -> None:
    configured = config(
        tmp_path, environment={"name": "test_replay_learner:Boundless", "options": {}}, agent={"name": "sac"}
    )
    with pytest.raises(
        ConfigError, match=r"'sac' and environment .*needs actions bounded on both sides; .* low=\(-inf"
    ):
        tianji_jax.train(configured, show=False)
