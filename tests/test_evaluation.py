"""Evaluations play what they say, count every episode once, and leave the policy as it is."""

from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest

import tianji_jax
from short_runs import cartpole_config, counting_config
from tianji_jax.checkpoint import FOLDER, Snapshot
from tianji_jax.cli import main
from tianji_jax.config import ConfigError
from tianji_jax.evaluation import Evaluation, bootstrap, evaluate, interquartile_mean, play
from tianji_jax.normalisation import initial_statistics
from tianji_jax.saved_policy import load_policy


class Uneven(gymnasium.Env[Any, Any]):
    """Half of the environments have episodes of 2 steps, the others of 20; a step gives 1."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.length = (2, 20)[seed % 2]
        self.left = self.length
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return np.zeros(1, np.float32), 1.0, self.left == 0, False, {}


def test_returns_and_numbers_are_exact(tmp_path: Path) -> None:
    run = tianji_jax.train(counting_config(tmp_path), show=False).path
    for episodes in (1, 3, 10):  # fewer than, and not a multiple of, the 4 environments
        found = evaluate(run, episodes)
        assert found.returns.tolist() == [15.0] * episodes
        assert found.lengths.tolist() == [5] * episodes
        assert not found.greedy


def test_the_function_is_not_hidden_by_a_module(tmp_path: Path) -> None:
    run = tianji_jax.train(counting_config(tmp_path), show=False).path
    for _ in range(2):
        assert tianji_jax.evaluate(run, 2).mean.value == 15
    clashes = {path.stem for path in Path(tianji_jax.__file__).parent.iterdir()} & set(tianji_jax.__all__)
    assert not clashes


def test_normalisers_are_frozen(tmp_path: Path) -> None:
    agent = {"agent": {"name": "ppo", "minibatches": 1, "normalise_observations": True}}
    run = tianji_jax.train(cartpole_config(tmp_path, agent), show=False).path
    policy = load_policy(run)
    before = jax.tree.map(np.array, policy.params)
    assert before.observation_statistics["observation"].num_samples > 0
    first = play(policy, 8, False, 0)
    jax.tree.map(np.testing.assert_array_equal, before, policy.params)
    # The statistics of one episode would change the play of the next.
    np.testing.assert_array_equal(first.returns, play(policy, 8, False, 0).returns)
    fresh = policy.params._replace(observation_statistics={"observation": initial_statistics((4,))})
    greedy, other = play(policy, 8, True, 0), play(policy._replace(params=fresh), 8, True, 0)
    assert not np.array_equal(greedy.returns, other.returns)  # they are used


def test_intervals_are_the_percentiles_of_resampled_estimates() -> None:
    # Of two values all resamples are known: both low 1/4, mixed 1/2, both high 1/4.
    interval = bootstrap(np.array([0.0, 1.0]), np.mean)
    assert (interval.value, interval.low, interval.high) == (0.5, 0.0, 1.0)
    # One success in 40: the number of successes in a resample is binomial, whose 2.5 and 97.5 % points are 0 and 3.
    rare = bootstrap(np.eye(40)[0], np.mean)
    assert (rare.value, rare.low, rare.high) == (1 / 40, 0.0, pytest.approx(3 / 40))
    # The interquartile mean is blind to one outlier, and nearly so its interval.
    values = np.append(np.ones(99), 1000.0)
    assert bootstrap(values, interquartile_mean).high == 1.0
    assert bootstrap(values, np.mean).high > 10


def test_short_episodes_do_not_crowd_out_long_ones(tmp_path: Path) -> None:
    environment = {"environment": {"name": f"{__name__}:Uneven", "options": {}}}
    run = tianji_jax.train(counting_config(tmp_path, environment), show=False).path
    found = evaluate(run, 40)
    assert sorted(found.returns) == [2.0] * 20 + [20.0] * 20


def test_the_policy_stays_as_it_is_and_the_same_seed_plays_the_same(tmp_path: Path) -> None:
    config = cartpole_config(tmp_path, {"run": {"environment_steps": 1000}})
    run = tianji_jax.train(config, show=False).path
    before = {path: path.stat().st_mtime_ns for path in (run / FOLDER).rglob("*")}
    sampled, greedy = evaluate(run, 12), evaluate(run, 12, greedy=True)
    again = evaluate(run, 12)
    np.testing.assert_array_equal(sampled.returns, again.returns)
    assert greedy.greedy
    assert not np.array_equal(sampled.returns, greedy.returns)
    assert not np.array_equal(sampled.returns, evaluate(run, 12, seed=1).returns)
    np.testing.assert_array_equal(sampled.returns, sampled.lengths)  # CartPole gives 1 a step
    assert {path: path.stat().st_mtime_ns for path in (run / FOLDER).rglob("*")} == before


def test_the_best_is_played_when_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(*arguments: Any) -> Snapshot:
        taken = Snapshot(*arguments)
        return taken._replace(episode_return=7.0 if taken.version == 4 else 1.0)

    monkeypatch.setattr("tianji_jax.run.Snapshot", snapshot)
    run = tianji_jax.train(counting_config(tmp_path, {"checkpoint": {"every_learner_steps": 4}}), show=False).path
    assert evaluate(run, 1).version > 4
    assert evaluate(run, 1, best=True).version == 4


def test_the_interquartile_mean_and_intervals_are_those_of_their_definitions() -> None:
    values = np.arange(12.0)
    assert interquartile_mean(values) == np.mean([3, 4, 5, 6, 7, 8])
    rng = np.random.default_rng(1)
    normal = rng.normal(10, 2, 400)
    interval = bootstrap(normal, np.mean)
    assert interval.value == normal.mean()
    # For a mean the bootstrap's interval is close to the normal one.
    half = 1.96 * normal.std() / np.sqrt(400)
    assert interval.low == pytest.approx(normal.mean() - half, abs=0.15 * half)
    assert interval.high == pytest.approx(normal.mean() + half, abs=0.15 * half)
    constant = Evaluation(np.full(5, 3.0), np.full(5, 2), 1, False)
    assert [constant.iqm.value, constant.iqm.low, constant.median.high] == [3.0, 3.0, 3.0]


def test_bad_input_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tianji_jax.train(counting_config(tmp_path), show=False).path
    for arguments, words in (
        ([str(tmp_path / "nowhere")], "is no run"),
        ([str(run), "--episodes", "0"], "--episodes: got 0"),
        ([str(run), "--seed", "-1"], "--seed: got -1"),
        ([str(run), "--best"], "no checkpoint with a mean return of 100 episodes"),
    ):
        assert main(["eval", *arguments]) == 2
        errors = capsys.readouterr().err
        assert words in errors
        assert len(errors.splitlines()) == 1
    with pytest.raises(ConfigError, match="can only be sampled"):
        evaluate(run, 1, greedy=True)
    assert main(["eval", str(run), "--episodes", "2"]) == 0
    output = capsys.readouterr().out
    assert "sampled" in output
    assert "sampled only: the agent has no act_greedy" in output
    assert "15.0" in output


def test_a_run_on_several_devices_is_evaluated_on_one(tmp_path: Path) -> None:
    run = tianji_jax.train(cartpole_config(tmp_path, {"learner": {"devices": 2}}), show=False).path
    assert len(evaluate(run, 2).returns) == 2
    assert len(jax.devices()) > 1
