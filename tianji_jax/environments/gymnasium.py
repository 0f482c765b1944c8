"""Environments of gymnasium and of your own behind the `Environments` interface.

They step one after the other in the thread that calls `recv`: Python holds one of them at a time anyway. An error
inside an environment comes out of `recv` (or `reset`, or the constructor) as it was raised, with its traceback.
"""

import difflib
import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tianji_jax.environments.base import (
    ActionCheck,
    EnvironmentConfigError,
    EpisodeCounter,
    Step,
    Turn,
)
from tianji_jax.types import (
    ActionSpec,
    ArraySpec,
    ContinuousActions,
    DiscreteActions,
    EnvSpec,
    MultiDiscreteActions,
    PyTree,
)

_NARROW = {"float64": "float32", "int64": "int32"}


def make_spec(name: str, options: Mapping[str, Any]) -> EnvSpec:
    """The spec of the environment `name`: makes one and closes it.

    Raises:
      EnvironmentConfigError: no such environment or option, or one that is not supported.
    """
    env = _factory(name, options)()
    try:
        return _env_spec(name, env)
    finally:
        env.close()


class GymnasiumEnvironments:
    """`Environments` of gymnasium environments; environment `i` is seeded with `seed + i` in the first reset."""

    def __init__(self, name: str, options: Mapping[str, Any], num_environments: int, seed: int) -> None:
        factory = _factory(name, options)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*precision lowered.*", category=UserWarning)
            # The observations are copied, and narrowed, below.
            self._vector = SyncVectorEnv(
                [factory] * num_environments, copy=False, autoreset_mode=AutoresetMode.NEXT_STEP
            )
        self._name = name
        self.spec = _env_spec(name, self._vector.envs[0])
        self.num_environments = num_environments
        self._seed: int | None = seed
        self._turn = Turn()
        self._check_action = ActionCheck(self.spec.action, num_environments)
        self._episodes = EpisodeCounter(num_environments)
        self._done = np.zeros(num_environments, bool)
        self._action: np.ndarray | None = None

    def reset(self) -> Step:
        self._turn.reset()
        observation, _ = self._vector.reset(seed=self._seed)
        self._seed = None  # a second reset goes on with the random numbers, as EnvPool's does
        self._episodes.reset()
        self._done = np.zeros(self.num_environments, bool)
        no, yes = np.zeros_like(self._done), np.ones_like(self._done)
        reward = np.zeros(self.num_environments, np.float32)
        return Step(self._observation(observation), yes, reward, no, no.copy(), no.copy(), [])

    def send(self, action: np.ndarray) -> None:
        action = self._check_action(action)
        self._turn.send()
        self._action = action

    def recv(self) -> Step:
        self._turn.recv()
        observation, reward, terminated, truncated, _ = self._vector.step(self._action)
        is_first, self._done = self._done, terminated | truncated
        valid = ~is_first
        truncated &= ~terminated
        reward = reward.astype(np.float32)
        episodes = self._episodes.add(reward, valid, self._done)
        return Step(self._observation(observation), is_first, reward, terminated, truncated, valid, episodes)

    def step(self, action: np.ndarray) -> Step:
        self.send(action)
        return self.recv()

    def render(self) -> np.ndarray:
        try:
            picture: Any = self._vector.envs[0].render()
        except (gymnasium.error.Error, NotImplementedError) as error:
            reason = str(error) or "it has no render"
            raise EnvironmentConfigError(f"environment {self._name!r} cannot be seen: {reason}") from error
        if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.shape[2:] != (3,):
            raise EnvironmentConfigError(
                f"environment {self._name!r} renders {type(picture).__name__}, allowed is uint8 [height, width, 3]"
            )
        return picture

    def close(self) -> None:
        if self._turn.close():
            self._vector.close()

    def _observation(self, observation: Any) -> PyTree:
        if isinstance(self.spec.observation, ArraySpec):
            return np.array(observation, self.spec.observation.dtype, order="C")
        flat = _flatten(observation)
        return {key: np.array(flat[key], spec.dtype, order="C") for key, spec in self.spec.observation.items()}


def names(word: str) -> list[str]:
    """Gymnasium's registered environments with `word` in their name (whatever the case), as configured."""
    return sorted(f"gymnasium:{task}" for task in gymnasium.registry if word.lower() in task.lower())


def _factory(name: str, options: Mapping[str, Any]) -> Callable[[], gymnasium.Env]:
    """What makes one environment, once it is known to exist and to take these options."""
    prefix, _, rest = name.partition(":")
    if prefix == "gymnasium":
        entry = _registered(name, rest)
        _check_options(name, options, entry, extra=("max_episode_steps",))

        def make() -> gymnasium.Env:
            try:
                # Its checker warns about style at every step's cost.
                return gymnasium.make(rest, disable_env_checker=True, **options)
            except gymnasium.error.Error as error:
                raise EnvironmentConfigError(f"environment {name!r}: gymnasium says {error}") from error

        return make
    entry = _imported(name, prefix, rest)
    _check_options(name, options, entry, extra=())

    def construct() -> gymnasium.Env:
        env = entry(**options)
        if not isinstance(env, gymnasium.Env):
            raise EnvironmentConfigError(f"environment {name!r} makes a {type(env).__name__}, not a gymnasium.Env")
        return env

    return construct


def _registered(name: str, task: str) -> Callable[..., Any]:
    if task not in gymnasium.registry:
        near = difflib.get_close_matches(task, gymnasium.registry, n=3, cutoff=0.5)
        hint = f"; near are {', '.join(f'gymnasium:{n}' for n in near)}" if near else ""
        raise EnvironmentConfigError(f"environment {name!r}: gymnasium has no environment {task!r}{hint}")
    entry: Any = gymnasium.registry[task].entry_point
    if entry is None:
        raise EnvironmentConfigError(f"environment {name!r} exists as a vector environment only")
    try:
        return load_env_creator(entry) if isinstance(entry, str) else entry
    except (ImportError, gymnasium.error.Error) as error:
        raise EnvironmentConfigError(f"environment {name!r} cannot be imported: {error}") from error


def _imported(name: str, module_path: str, attribute: str) -> Callable[..., Any]:
    try:
        if not module_path or module_path.startswith("."):
            raise ModuleNotFoundError(name=module_path)  # of no package that it could be relative to
        module = importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_path}.".startswith(f"{error.name}."):
            raise  # the module is there; one that it imports is not
        raise EnvironmentConfigError(
            f"environment {name!r}: there is no module {module_path!r}; allowed before the colon are 'envpool', "
            "'gymnasium' or the path of an importable module"
        ) from error
    entry = getattr(module, attribute, None)
    if not callable(entry):
        public = [key for key, value in vars(module).items() if callable(value)]
        near = difflib.get_close_matches(attribute, public, n=1)
        hint = f"; near is {near[0]!r}" if near else ""
        raise EnvironmentConfigError(
            f"environment {name!r}: {module_path} has no class or function {attribute!r}{hint}"
        )
    return entry


def _check_options(name: str, options: Mapping[str, Any], entry: Callable[..., Any], extra: tuple[str, ...]) -> None:
    parameters = inspect.signature(entry).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    allowed = [*(p.name for p in named), *extra]
    for key in options:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise EnvironmentConfigError(
                f"environment {name!r} has no option {key!r}: {hint}Allowed are {', '.join(sorted(allowed)) or 'none'}"
            )


def _env_spec(name: str, env: gymnasium.Env) -> EnvSpec:
    observation = _observation_spec(name, env.observation_space)
    action = _action_spec(name, env.action_space)
    mask = observation.get("action_mask") if isinstance(observation, dict) else None
    masked = isinstance(action, DiscreteActions) and mask and mask.shape == (action.num_values,)
    threshold = None if env.spec is None else env.spec.reward_threshold
    return EnvSpec(
        name=name,
        observation=observation,
        action=action,
        action_mask="action_mask" if masked else None,
        frame_skip=int(getattr(env.unwrapped, "frame_skip", 1)),
        stop_at_return=None if threshold is None else float(threshold),
    )


def _observation_spec(name: str, space: spaces.Space) -> ArraySpec | dict[str, ArraySpec]:
    leaves = _flatten(space) if isinstance(space, spaces.Dict) else {"": space}
    specs = {}
    for key, leaf in leaves.items():
        if not isinstance(leaf, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
            raise EnvironmentConfigError(
                f"environment {name!r} has observations of {leaf}; allowed are Box, Discrete, MultiDiscrete, "
                "MultiBinary, and Dict of these"
            )
        dtype = np.dtype(leaf.dtype).name
        specs[key] = ArraySpec(leaf.shape or (), np.dtype(_NARROW.get(dtype, dtype)))
    return specs if isinstance(space, spaces.Dict) else specs[""]


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dicts (or `Dict` spaces) by their keys joined with "/"."""
    leaves = {}
    for key, value in tree.items():
        if isinstance(value, dict | spaces.Dict):
            leaves.update(_flatten(value, f"{prefix}{key}/"))
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def _action_spec(name: str, space: spaces.Space) -> ActionSpec:
    match space:
        case spaces.Discrete() if space.start == 0:
            return DiscreteActions(int(space.n))
        case spaces.MultiDiscrete() if space.nvec.ndim == 1 and not np.any(space.start):
            return MultiDiscreteActions(tuple(int(n) for n in space.nvec))
        case spaces.Box() if len(space.shape) == 1 and np.dtype(space.dtype).kind == "f":
            bounds = (tuple(map(float, bound.astype(np.float32))) for bound in (space.low, space.high))
            return ContinuousActions(*bounds)
        case _:
            raise EnvironmentConfigError(
                f"environment {name!r} takes actions of {space}; allowed are Discrete and MultiDiscrete from 0, and "
                "a Box that is a vector of floating point numbers"
            )
