"""Agents reach their scores. Minutes long: `make test-learning`."""

from pathlib import Path

import pytest

import tianji_jax

CONFIGS = Path(__file__).parents[1] / "configs"

pytestmark = [pytest.mark.learning, pytest.mark.timeout(600)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("placement", ["thread", "process"])
@pytest.mark.parametrize("agent", ["ppo", "impala"])
def test_cartpole_is_solved(tmp_path: Path, agent: str, placement: str, seed: int) -> None:
    overrides = [f"run.directory={tmp_path}", f"run.seed={seed}", f"actors.placement={placement}"]
    result = tianji_jax.train(tianji_jax.load(CONFIGS / f"cartpole_{agent}.yaml", overrides), show=False)
    assert result.solved
    assert result.episode_return is not None
    assert result.episode_return >= 475


@pytest.mark.parametrize("seed", range(5))
def test_cartpole_is_solved_from_replay(tmp_path: Path, seed: int) -> None:
    overrides = [f"run.directory={tmp_path}", f"run.seed={seed}"]
    assert tianji_jax.train(tianji_jax.load(CONFIGS / "cartpole_dqn.yaml", overrides), show=False).solved


def test_a_memory_task_is_solved_from_replay(tmp_path: Path) -> None:
    config = tianji_jax.load(CONFIGS / "memory_r2d2.yaml", [f"run.directory={tmp_path}"])
    assert tianji_jax.train(config, show=False).solved


def test_a_memory_task_is_solved_by_a_recurrent_policy_only(tmp_path: Path) -> None:
    def train(*overrides: str) -> tianji_jax.Result:
        config = tianji_jax.load(CONFIGS / "memory_ppo.yaml", [f"run.directory={tmp_path}", *overrides])
        return tianji_jax.train(config, show=False)

    recurrent = train()
    assert recurrent.solved
    steps = recurrent.environment_steps
    feed_forward = train("agent.network.recurrence=none", f"run.environment_steps={2 * steps}")
    assert not feed_forward.solved
    assert feed_forward.episode_return is not None
    assert abs(feed_forward.episode_return) < 0.3


def test_pendulum_is_swung_up(tmp_path: Path) -> None:
    config = tianji_jax.load(CONFIGS / "pendulum_ppo.yaml", [f"run.directory={tmp_path}"])
    result = tianji_jax.train(config, show=False)
    assert result.episode_return is not None
    assert result.episode_return > -300


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("agent", ["sac", "td3"])
def test_pendulum_is_swung_up_from_replay(tmp_path: Path, agent: str, seed: int) -> None:
    overrides = [f"run.directory={tmp_path}", f"run.seed={seed}", f"agent.name={agent}"]
    result = tianji_jax.train(tianji_jax.load(CONFIGS / "pendulum_sac.yaml", overrides), show=False)
    assert tianji_jax.evaluate(result.path, 50, greedy=True).mean.value >= -200


def test_a_double_pendulum_is_balanced_at_the_published_level(tmp_path: Path) -> None:
    config = tianji_jax.load(CONFIGS / "double_pendulum_sac.yaml", [f"run.directory={tmp_path}"])
    result = tianji_jax.train(config, show=False)
    # docs/results.md has the source; an episode of 1,000 steps can bring some 9,360.
    assert tianji_jax.evaluate(result.path, 100, greedy=True).mean.value >= 9_300
