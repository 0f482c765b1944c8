"""EnvPool's own ways: time limits, lives, option names, what it hands out."""

import subprocess
import sys
from typing import Any

import envpool
import numpy as np
import pytest

from tianji_jax import environments
from tianji_jax.environments import EnvironmentConfigError
from tianji_jax.environments.envpool import EnvPoolEnvironments
from tianji_jax.types import ContinuousActions, DiscreteActions, MultiDiscreteActions

SMALL = {"img_height": 36, "img_width": 36}


def paddle(t: int) -> np.ndarray:
    return np.array([(1, 2, 3)[t // 7 % 3]], np.int32)


def test_the_time_limit_truncates_with_the_true_last_observation() -> None:
    limited = environments.make("envpool:Pendulum-v1", {"max_episode_steps": 10}, 2, seed=1, threads=1)
    unlimited = environments.make("envpool:Pendulum-v1", {"max_episode_steps": 30}, 2, seed=1, threads=1)
    limited.reset()
    unlimited.reset()
    for t in range(10):
        action = np.full((2, 1), t / 5 - 1, np.float32)
        step, other = limited.step(action), unlimited.step(action)
        np.testing.assert_array_equal(step.observation, other.observation)
        assert step.truncated.all() == (t == 9)
        assert not step.terminated.any()
    assert [episode.length for episode in step.episodes] == [10, 10]


def test_at_exactly_the_limit_envpool_hides_the_termination() -> None:
    # The limitation that the module's docstring names. If this fails EnvPool has mended it: amend the docstring.
    def fall(limit: int) -> tuple[int, bool, bool]:
        options = {"max_episode_steps": limit}
        envs = environments.make("envpool:CartPole-v1", options, 1, seed=1, threads=1)
        envs.reset()
        for t in range(1, 60):
            step = envs.step(np.zeros(1, np.int32))
            if step.episodes:
                return t, bool(step.terminated[0]), bool(step.truncated[0])
        raise AssertionError("the pole never fell")

    length, *flags = fall(500)
    assert flags == [True, False]
    assert fall(length) == (length, False, True)
    assert fall(length + 1) == (length, True, False)


def test_terminated_wins_where_the_game_tells() -> None:
    def game(limit: int) -> tuple[int, bool, bool]:
        envs = environments.make("envpool:Breakout-v5", {"max_episode_steps": limit, **SMALL}, 1, seed=0, threads=1)
        envs.reset()
        for t in range(1, 800):
            step = envs.step(paddle(t))
            if step.episodes:
                return t, bool(step.terminated[0]), bool(step.truncated[0])
        raise AssertionError("the game never ended")

    length, *flags = game(27000)
    assert flags == [True, False]
    assert game(length) == (length, True, False)
    assert game(length - 1) == (length - 1, False, True)


def test_a_long_game_of_2048_is_not_truncated() -> None:
    # EnvPool ends no game at the limit, but calls one that lasted longer truncated; a good player's do (at 1000).
    def length_and_flags(limit: int) -> tuple[int, bool, bool]:
        pool = envpool.make_gymnasium("Game2048-v1", num_envs=1, seed=0, max_episode_steps=limit)
        (board, _), rng = pool.reset(), np.random.default_rng(0)
        for t in range(1, 1000):
            action = rng.choice(np.flatnonzero(board["action_mask"][0]), 1).astype(np.int32)
            board, _, terminated, truncated, _ = pool.step(action)
            if terminated[0] or truncated[0]:
                return t, bool(terminated[0]), bool(truncated[0])
        raise AssertionError("the game never ended")

    length, *flags = length_and_flags(2**31 - 1)
    assert flags == [True, False]
    assert length_and_flags(30) == (length, False, True)
    envs = environments.make("envpool:Game2048-v1", {}, 1, seed=0, threads=1)
    assert isinstance(envs, EnvPoolEnvironments)
    assert envs._pool.config["max_episode_steps"] == 2**31 - 1


@pytest.mark.parametrize("clip", [False, True])
def test_a_lost_life_terminates_but_the_episode_is_the_game(clip: bool) -> None:
    options = {"episodic_life": True, "reward_clip": clip, **SMALL}
    envs = environments.make("envpool:MsPacman-v5", options, 1, seed=0, threads=1)
    raw = envpool.make_gymnasium("MsPacman-v5", num_envs=1, seed=0, num_threads=1, **options)
    envs.reset()
    raw.reset()
    rng = np.random.default_rng(0)
    total, length, lives, lost, games, was_done = 0.0, 0, 3, 0, 0, False
    for _ in range(1500):
        action = rng.integers(0, envs.spec.action.num_values, 1).astype(np.int32)
        step, (_, reward, terminated, truncated, info) = envs.step(action), raw.step(action)
        np.testing.assert_array_equal(step.reward, reward)
        assert step.valid[0] == (not was_done)
        total, length = total + info["reward"][0], length + (not was_done)
        was_done = bool(terminated[0] or truncated[0])
        if not info["terminated"][0]:
            assert not step.episodes
            fewer = info["lives"][0] < lives
            assert step.terminated[0] == fewer
            lost += int(fewer)
        else:
            assert step.terminated[0]
            assert step.episodes == [(total, length)]
            total, length, games = 0.0, 0, games + 1
        lives = info["lives"][0] if not info["terminated"][0] else 3
        assert abs(step.reward[0]) <= 1 or not clip
        if games == 2:
            break
    envs.close()
    assert games == 2
    assert lost >= 4


def test_without_episodic_life_a_lost_life_is_nothing() -> None:
    envs = environments.make("envpool:Breakout-v5", SMALL, 1, seed=0, threads=1)
    envs.reset()
    steps = [envs.step(paddle(t)) for t in range(1, 350)]
    ends = [t for t, step in enumerate(steps) if step.terminated[0]]
    assert len(ends) == 1  # five lives, one end
    assert steps[ends[0]].episodes[0].length == ends[0] + 1
    assert [t for t, step in enumerate(steps) if not step.valid[0]] == [ends[0] + 1]


def test_atari_spec() -> None:
    spec = environments.make_spec("envpool:Pong-v5", {"stack_num": 2, **SMALL, "frame_skip": 3})
    assert str(spec.observation) == "uint8[2,36,36]"
    assert spec.action == DiscreteActions(6)
    assert spec.frame_skip == 3
    assert spec.stop_at_return is None


def test_specs_of_other_kinds() -> None:
    spec = environments.make_spec("envpool:CartPole-v1", {})
    assert (spec.stop_at_return, spec.frame_skip, spec.action_mask) == (475.0, 1, None)
    spec = environments.make_spec("envpool:HalfCheetah-v5", {})
    assert str(spec.observation) == "float32[17]"
    assert spec.action == ContinuousActions((-1.0,) * 6, (1.0,) * 6)
    spec = environments.make_spec("envpool:Maze-v0", {})
    assert spec.action_mask == "action_mask"
    assert {"agent_position/row", "walls", "action_mask"} < set(spec.observation)
    spec = environments.make_spec("envpool:Minesweeper-v0", {})
    assert (spec.action, spec.action_mask) == (MultiDiscreteActions((10, 10)), None)
    assert list(environments.make_spec("envpool:Play2048-v1", {}).observation) == ["observation", "action_mask"]


@pytest.mark.parametrize("name", ["envpool:Game2048-v1", "envpool:Play2048-v1"])
def test_the_mask_tells_the_moves_that_change_the_board(name: str) -> None:
    envs = environments.make(name, {}, 1, seed=0, threads=1)
    step, rng, forbidden = envs.reset(), np.random.default_rng(0), 0
    for _ in range(300):
        mask = step.observation["action_mask"][0].astype(bool)
        if step.terminated[0]:
            assert not mask.any() or name.endswith("Play2048-v1")
            mask = np.ones(4, bool)
        forbidden += int((~mask).sum())
        before = step.observation
        step = envs.step(rng.choice(np.flatnonzero(mask), 1))
        if step.valid[0]:
            key = "board" if "board" in before else "observation"
            assert not np.array_equal(before[key], step.observation[key])
    envs.close()
    assert forbidden > 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("CartPole-v1", {}, "use 'envpool:CartPole-v1'"),
        ("envpool:CartPol-v1", {}, "near are envpool:CartPole-v1"),
        ("envpool:", {}, "has no task ''"),
        ("envpool:Pong-v5", {"img_heigth": 36}, "'img_heigth': did you mean 'img_height'"),
        ("envpool:Pong-v5", {"img_height": "36"}, "'img_height' is '36', allowed is int"),
        ("envpool:Pong-v5", {"episodic_life": 1}, "'episodic_life' is 1, allowed is bool"),
        ("envpool:Pong-v5", {"stack_num": True}, "'stack_num' is True, allowed is int"),
        ("envpool:Pong-v5", {"stack_num": 0}, "'stack_num' is 0, allowed is 1 or more"),
        ("envpool:Pong-v5", {"num_envs": 4}, "'num_envs' is not allowed: set the number of environments"),
        ("envpool:Pong-v5", {"seed": 4}, "'seed' is not allowed"),
        ("envpool:Pong-v5", {"render_width": 64}, "has no option 'render_width'"),
        ("envpool:Maze-v0", {"max_episode_steps": 5}, "'max_episode_steps' is not allowed: the task ignores it"),
        ("envpool:Catch-v0", {"max_episode_steps": 5}, "the task ignores it"),
        ("envpool:CartPole-v1", {"from_pixels": True}, "from_pixels=True is only supported for MuJoCo"),
        ("envpool:TicTacToe-v1", {}, "has 2 players; only single-player"),
        ("envpool:SearchAndRescue-v0", {}, r"actions of shape \(2, 2\); allowed is a vector"),
        ("envpool:D1Basic-v1", {"episodic_life": True}, "episodic_life=True is not supported"),
    ],
)
def test_what_does_not_fit_is_said_by_name(name: str, options: dict[str, Any], message: str) -> None:
    for call in (
        lambda: environments.make_spec(name, options),
        lambda: environments.make(name, options, 2, seed=0, threads=1),
    ):
        with pytest.raises(EnvironmentConfigError, match=message):
            call()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_environments": 0}, "num_environments is 0"),
        ({"threads": -1}, "threads is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**31 - 1}, "seed is 2147483647, allowed is 0 to 2147483646 for 2 environments"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(EnvironmentConfigError, match=message):
        environments.make("envpool:CartPole-v1", {}, **{"num_environments": 2, "seed": 0, "threads": 1, **arguments})
    if "seed" in arguments:
        environments.make("envpool:CartPole-v1", {}, 2, seed=2**31 - 2, threads=1).close()


def test_names_are_found_by_a_word() -> None:
    assert "envpool:Pong-v5" in environments.names("pong")
    assert {"envpool:Acrobot-v1", "gymnasium:Acrobot-v1"} <= set(environments.names("ACROBOT"))
    assert environments.names("no such word") == []
    assert len(environments.names()) > 1000


def test_envpool_itself_checks_nothing() -> None:
    # Why `ActionCheck` exists: the wrong number of actions ends the process. In a process of its own, therefore.
    code = """
import envpool, numpy as np
pool = envpool.make_gymnasium("CartPole-v1", num_envs=4)
pool.reset()
pool.step(np.full(4, 7, np.int32))
assert pool.recv()[0].shape[0] == 0
print("still alive", flush=True)
pool.step(np.zeros(3, np.int32))
print("survived", flush=True)
"""
    process = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)
    assert process.stdout == "still alive\n"
    assert process.returncode != 0
