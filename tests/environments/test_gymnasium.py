"""Environments of gymnasium and of the user's own."""

import sys
import traceback
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from tianji_jax import environments
from tianji_jax.environments import EnvironmentConfigError
from tianji_jax.types import ContinuousActions, DiscreteActions, MultiDiscreteActions

HERE = __name__


class Scripted(gymnasium.Env):
    """Any spaces; ends as it is told to after two steps."""

    def __init__(
        self,
        observation_space: spaces.Space | None = None,
        action_space: spaces.Space | None = None,
        terminated: bool = True,
        truncated: bool = True,
    ) -> None:
        self.observation_space = observation_space or spaces.Box(0, 1, (2,), np.float64)
        self.action_space = action_space or spaces.Discrete(2)
        self._end, self._step = (terminated, truncated), 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(1000)))
        self._step = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        self.taken = action
        return self.observation_space.sample(), 1.0, *(flag and self._step == 2 for flag in self._end), {}


class Masked(Scripted):
    """A Dict observation with a mask and a frame skip."""

    frame_skip = 4

    def __init__(self) -> None:
        super().__init__(
            spaces.Dict(
                {
                    "board": spaces.Dict({"own": spaces.Box(0, 255, (2, 3), np.uint8), "turn": spaces.Discrete(5)}),
                    "action_mask": spaces.MultiBinary(3),
                }
            ),
            spaces.Discrete(3),
        )


def not_an_env() -> dict[str, Any]:
    return {}


def limited(max_steps: int) -> gymnasium.Env:
    return gymnasium.wrappers.TimeLimit(Scripted(terminated=False, truncated=False), max_steps)


def test_terminated_wins() -> None:
    envs = environments.make(f"{HERE}:Scripted", {}, 2, seed=0, threads=1)
    envs.reset()
    for _ in range(2):
        step = envs.step(np.zeros(2, np.int32))
    assert step.terminated.all()
    assert not step.truncated.any()
    assert step.episodes == [(2.0, 2), (2.0, 2)]


def test_a_factory_with_a_time_limit() -> None:
    envs = environments.make(f"{HERE}:limited", {"max_steps": 5}, 1, seed=0, threads=1)
    envs.reset()
    steps = [envs.step(np.zeros(1, np.int32)) for _ in range(12)]
    assert [t for t, step in enumerate(steps) if step.truncated[0]] == [4, 10]
    assert [t for t, step in enumerate(steps) if step.is_first[0]] == [5, 11]


def test_nested_observations_masks_and_frame_skip() -> None:
    envs = environments.make(f"{HERE}:Masked", {}, 2, seed=0, threads=1)
    spec = envs.spec
    assert {key: str(array) for key, array in spec.observation.items()} == {
        "action_mask": "int8[3]",
        "board/own": "uint8[2,3]",
        "board/turn": "int32[]",
    }
    assert (spec.action_mask, spec.frame_skip) == ("action_mask", 4)
    step = envs.reset()
    assert step.observation["board/own"].shape == (2, 2, 3)
    assert step.observation["board/turn"].dtype == np.int32


@pytest.mark.parametrize(
    ("space", "expected", "action"),
    [
        (spaces.MultiDiscrete([2, 3]), MultiDiscreteActions((2, 3)), np.array([[1, 2]])),
        (
            spaces.Box(np.float32([-1, -np.inf]), np.float32([1, np.inf])),
            ContinuousActions((-1.0, -float("inf")), (1.0, float("inf"))),
            np.float32([[0.5, 1e6]]),
        ),
        (spaces.Discrete(7), DiscreteActions(7), np.array([6])),
    ],
)
def test_actions_arrive(space: spaces.Space, expected: Any, action: np.ndarray) -> None:
    envs = environments.make(f"{HERE}:Scripted", {"action_space": space}, 1, seed=0, threads=1)
    assert envs.spec.action == expected
    envs.reset()
    envs.step(action)
    np.testing.assert_array_equal(envs._vector.envs[0].taken, action[0])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gymnasium:Acrobt-v1", {}, "near are gymnasium:Acrobot-v1"),
        ("gymnasium:Acrobot-v1", {"colour": 1}, "no option 'colour': Allowed are max_episode_steps, render_mode"),
        ("./grid:Grid", {}, "no module './grid'"),
        (":Grid", {}, "no module ''"),
        ("no.such.module:Env", {}, "no module 'no.such.module'; allowed before the colon are"),
        (f"{HERE}:Script", {}, "no class or function 'Script'; near is 'Scripted'"),
        (f"{HERE}:HERE", {}, "no class or function 'HERE'"),
        (f"{HERE}:Scripted", {"terminate": True}, "no option 'terminate': did you mean 'terminated'"),
        (f"{HERE}:not_an_env", {}, "makes a dict, not a gymnasium.Env"),
        (f"{HERE}:Scripted", {"action_space": spaces.Discrete(3, start=1)}, "takes actions of Discrete"),
        (f"{HERE}:Scripted", {"action_space": spaces.Box(0, 1, (2, 2))}, "takes actions of Box"),
        (f"{HERE}:Scripted", {"action_space": spaces.Text(3)}, "takes actions of Text"),
        (f"{HERE}:Scripted", {"observation_space": spaces.Text(3)}, "has observations of Text"),
        (f"{HERE}:Scripted", {"observation_space": spaces.Tuple([spaces.Discrete(2)])}, "has observations of Tuple"),
    ],
)
def test_what_does_not_fit_is_said_by_name(name: str, options: dict[str, Any], message: str) -> None:
    for call in (
        lambda: environments.make_spec(name, options),
        lambda: environments.make(name, options, 2, seed=0, threads=1),
    ):
        with pytest.raises(EnvironmentConfigError, match=message):
            call()


def test_a_module_that_fails_to_import_another_says_so_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_env_module.py").write_text("import a_module_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        environments.make_spec("own_env_module:Env", {})
    assert "own_env_module" not in sys.modules


def test_an_error_inside_an_environment_keeps_its_traceback() -> None:
    envs = environments.make("tianji_jax.testing:CountingEnv", {"fail_at_step": 3}, 2, seed=0, threads=1)
    envs.reset()
    for _ in range(2):
        envs.step(np.zeros(2, np.int32))
    envs.send(np.zeros(2, np.int32))
    with pytest.raises(RuntimeError, match="fails at step 3") as error:
        envs.recv()
    assert "testing.py" in "".join(traceback.format_tb(error.value.__traceback__))
    envs.close()
