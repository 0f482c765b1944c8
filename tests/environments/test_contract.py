"""What every `Environments` promises, on EnvPool and on gymnasium alike."""

from typing import Any

import numpy as np
import pytest

from tianji_jax import environments
from tianji_jax.environments import Step
from tianji_jax.types import ArraySpec, ContinuousActions, DiscreteActions, EnvSpec

B = 3

# name, options, steps to take, and how episodes end within them.
CASES: list[tuple[str, dict[str, Any], int, set[str]]] = [
    ("envpool:CartPole-v1", {}, 120, {"terminated"}),
    ("envpool:CartPole-v1", {"max_episode_steps": 20}, 200, {"terminated", "truncated"}),
    ("envpool:Acrobot-v1", {"max_episode_steps": 25}, 80, {"truncated"}),
    ("envpool:Pendulum-v1", {"max_episode_steps": 25}, 80, {"truncated"}),
    ("envpool:LunarLander-v3", {}, 300, {"terminated"}),
    ("envpool:Hopper-v5", {}, 150, {"terminated"}),
    ("envpool:HalfCheetah-v5", {"max_episode_steps": 20}, 70, {"truncated"}),
    ("envpool:Game2048-v1", {}, 300, {"terminated"}),
    ("envpool:Play2048-v1", {}, 100, {"terminated"}),
    ("envpool:Minesweeper-v0", {}, 60, {"terminated"}),
    ("envpool:Maze-v0", {}, 110, {"terminated"}),
    ("envpool:FetchReach-v4", {}, 60, {"truncated"}),
    ("envpool:FrozenLake-v1", {}, 60, {"terminated"}),
    ("envpool:Pong-v5", {"max_episode_steps": 15, "img_height": 36, "img_width": 36}, 40, {"truncated"}),
    ("gymnasium:CartPole-v1", {}, 120, {"terminated"}),
    ("gymnasium:CartPole-v1", {"max_episode_steps": 20}, 200, {"terminated", "truncated"}),
    ("gymnasium:Acrobot-v1", {"max_episode_steps": 25}, 80, {"truncated"}),
    ("gymnasium:Pendulum-v1", {"max_episode_steps": 25}, 80, {"truncated"}),
    ("tianji_jax.testing:CountingEnv", {"episode_length": 4}, 30, {"terminated"}),
    ("tianji_jax.testing:CountingEnv", {"episode_length": 1, "end": "truncate"}, 30, {"truncated"}),
    ("tianji_jax.environments.memory:RecallCue", {}, 40, {"terminated"}),
]


def random_actions(spec: EnvSpec, rng: np.random.Generator, batch: int = B) -> np.ndarray:
    if isinstance(spec.action, DiscreteActions):
        return rng.integers(0, spec.action.num_values, batch)
    if isinstance(spec.action, ContinuousActions):
        return rng.uniform(spec.action.low, spec.action.high, (batch, len(spec.action.low))).astype(np.float32)
    return rng.integers(0, spec.action.num_values, (batch, len(spec.action.num_values)))


def observations(tree: Any) -> dict[str, Any]:
    return tree if isinstance(tree, dict) else {"": tree}


def check_types(step: Step, spec: EnvSpec) -> None:
    given, expected = observations(step.observation), observations(spec.observation)
    assert list(given) == list(expected)
    for key, array in given.items():
        assert isinstance(expected[key], ArraySpec)
        assert ArraySpec(array.shape, array.dtype) == expected[key].prepend(B)
        assert array.dtype not in (np.float64, np.int64)
        assert array.flags.c_contiguous
    for flag in (step.is_first, step.terminated, step.truncated, step.valid):
        assert flag.shape == (B,)
        assert flag.dtype == np.bool_
    assert step.reward.shape == (B,)
    assert step.reward.dtype == np.float32


@pytest.mark.parametrize(("name", "options", "steps", "ends"), CASES)
def test_steps_episodes_and_resets(name: str, options: dict[str, Any], steps: int, ends: set[str]) -> None:
    envs = environments.make(name, options, B, seed=3, threads=1)
    spec, rng = envs.spec, np.random.default_rng(0)
    assert spec == environments.make_spec(name, options)
    step = envs.reset()
    check_types(step, spec)
    assert step.is_first.all()
    assert not (step.valid | step.terminated | step.truncated).any()
    assert step.episodes == []
    running: list[list[float]] = [[] for _ in range(B)]
    ended, seen = [False] * B, set()
    for _ in range(steps):
        step = envs.step(random_actions(spec, rng))
        check_types(step, spec)
        expected = []
        for i in range(B):
            assert step.is_first[i] == ended[i]
            assert step.valid[i] == (not ended[i])
            assert not (step.terminated[i] and step.truncated[i])
            if ended[i]:
                assert step.reward[i] == 0
                assert not step.terminated[i]
                assert not step.truncated[i]
            else:
                running[i].append(float(step.reward[i]))
            ended[i] = bool(step.terminated[i] or step.truncated[i])
            if ended[i]:
                expected.append((sum(running[i]), len(running[i])))
                running[i] = []
                seen.add("terminated" if step.terminated[i] else "truncated")
        assert [length for _, length in expected] == [episode.length for episode in step.episodes]
        np.testing.assert_allclose([r for r, _ in expected], [e.episode_return for e in step.episodes], rtol=1e-6)
    envs.close()
    assert seen == ends


BOTH = ["envpool:CartPole-v1", "gymnasium:CartPole-v1"]


@pytest.mark.parametrize("name", BOTH)
def test_calls_out_of_turn(name: str) -> None:
    envs, action = environments.make(name, {}, 2, seed=0, threads=1), np.zeros(2, np.int32)
    with pytest.raises(RuntimeError, match="call reset"):
        envs.send(action)
    with pytest.raises(RuntimeError, match="call send"):
        envs.recv()
    envs.reset()
    envs.send(action)
    with pytest.raises(RuntimeError, match="call recv"):
        envs.send(action)
    with pytest.raises(RuntimeError, match="call recv"):
        envs.reset()
    assert envs.recv().valid.all()
    with pytest.raises(RuntimeError, match="call send"):
        envs.recv()
    envs.close()
    envs.close()
    with pytest.raises(RuntimeError, match="closed"):
        envs.send(action)
    with pytest.raises(RuntimeError, match="closed"):
        envs.reset()


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    ("action", "message"),
    [
        (np.zeros(3, np.int32), r"shape \(3,\), expected \(2,\)"),
        (np.zeros((2, 1), np.int32), r"expected \(2,\)"),
        (np.int32(0), r"expected \(2,\)"),
        (np.array([0, 2]), "got 2 in environment 1, allowed is 0 to 1"),
        (np.array([-1, 0]), "got -1 in environment 0"),
        (np.array([0.0, 1.0]), "dtype float64, expected integers"),
        (np.array([True, False]), "dtype bool, expected integers"),
    ],
)
def test_discrete_actions_are_checked(name: str, action: np.ndarray, message: str) -> None:
    envs = environments.make(name, {}, 2, seed=0, threads=1)
    envs.reset()
    with pytest.raises(ValueError, match=message):
        envs.send(action)
    assert envs.step(np.array([0, 1])).valid.all()  # nothing was started
    envs.close()


@pytest.mark.parametrize("name", ["envpool:Pendulum-v1", "gymnasium:Pendulum-v1"])
def test_continuous_actions_are_checked(name: str) -> None:
    envs = environments.make(name, {}, 2, seed=0, threads=1)
    envs.reset()
    for action, message in [
        (np.array([[0.0], [np.nan]], np.float32), "not finite: got nan in environment 1"),
        (np.array([[np.inf], [0]], np.float32), "not finite"),
        (np.array([[0.0], [2.1]], np.float32), r"got 2.09.* in environment 1, allowed is -2.0 to 2.0"),
        (np.zeros((2, 1), np.int32), "dtype int32, expected floating point"),
        (np.zeros(2, np.float32), r"shape \(2,\), expected \(2, 1\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            envs.send(action)
    rounded = np.nextafter(np.full((2, 1), 2, np.float32), np.float32(3))
    assert envs.step(rounded).valid.all()  # an overshoot by rounding is none
    envs.close()


def test_multi_discrete_actions_are_checked() -> None:
    envs = environments.make("envpool:RubiksCube-v0", {}, 2, seed=0, threads=1)
    envs.reset()
    with pytest.raises(ValueError, match="got 1 in environment 1, allowed is 0 to 0"):
        envs.send(np.array([[5, 0, 2], [5, 1, 2]]))
    assert envs.step(np.array([[5, 0, 2], [5, 0, 2]])).valid.all()
    envs.close()


@pytest.mark.parametrize("name", BOTH)
def test_same_seed_same_numbers_and_seeds_are_spaced(name: str) -> None:
    def rollout(num: int, seed: int, rows: slice) -> list[np.ndarray]:
        envs = environments.make(name, {}, num, seed=seed, threads=2)
        record = [envs.reset().observation[rows]]
        for t in range(60):
            step = envs.step(np.full(num, t % 3 == 0, np.int32))
            record += [step.observation[rows], step.reward[rows], step.terminated[rows]]
        envs.close()
        return record

    everything = slice(None)
    first, again, other = rollout(4, 5, everything), rollout(4, 5, everything), rollout(4, 6, everything)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])
    assert len({row.tobytes() for row in first[0]}) == 4
    # Environment i of seed s is environment 0 of seed s + i.
    for a, b in zip(rollout(4, 5, slice(2, 4)), rollout(2, 7, everything), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", BOTH)
def test_steps_keep_their_numbers_and_reset_starts_anew(name: str) -> None:
    envs = environments.make(name, {}, 2, seed=0, threads=1)
    steps = [envs.reset()]
    copies = [steps[0].observation.copy()]
    for _ in range(5):
        steps.append(envs.step(np.zeros(2, np.int32)))
        copies.append(steps[-1].observation.copy())
    again = envs.reset()
    assert again.is_first.all()
    assert not np.array_equal(again.observation, copies[0])
    for step, copy in zip(steps, copies, strict=True):
        np.testing.assert_array_equal(step.observation, copy)
    lengths = []
    for _ in range(30):
        lengths += [episode.length for episode in envs.step(np.zeros(2, np.int32)).episodes]
    assert lengths
    assert max(lengths) <= 11  # the five steps before the second reset are forgotten
    envs.close()


def test_two_sets_take_turns() -> None:
    sets = [environments.make("envpool:CartPole-v1", {}, 4, seed=4 * i, threads=1) for i in range(2)]
    alone = environments.make("envpool:CartPole-v1", {}, 8, seed=0, threads=1)
    np.testing.assert_array_equal(
        np.concatenate([envs.reset().observation for envs in sets]), alone.reset().observation
    )
    rng = np.random.default_rng(0)
    for _ in range(40):
        action = rng.integers(0, 2, 8)
        sets[0].send(action[:4])
        sets[1].send(action[4:])
        together = [envs.recv() for envs in sets]
        step = alone.step(action)
        np.testing.assert_array_equal(np.concatenate([s.observation for s in together]), step.observation)
        assert together[0].episodes + together[1].episodes == step.episodes
    sets[0].send(action[:4])
    for envs in (*sets, alone):
        envs.close()  # also while a step is under way
