"""EnvPool behind the `Environments` interface.

What EnvPool (1.2) does, and what this module makes of it:

- After the end of an episode it resets on the next `send`, ignores that action and returns the new episode's first
  observation with reward 0: exactly `Step`'s contract.
- It hands out fresh arrays with every `recv` (never written again): they are passed on without a copy, but for
  float64 and int64 ones, which are narrowed.
- It reports a time limit as truncated, and at exactly the time limit as truncated only, even where the task's own rules
  ended the episode in the same step. Where it tells (Atari's `info["terminated"]`), terminated wins here. For
  other tasks a last step at exactly the limit counts as truncated; raise `max_episode_steps` if that matters.
- Some families ignore `max_episode_steps` and end by their own rules (Jumanji reports even its time limits as
  terminated, as the original does); for them the option is refused.
- With `episodic_life` a lost life is done without a time limit and the next step goes on with the same game. For
  learning that is a termination; the reported `Episode` is the game's over all lives, from the unclipped
  `info["reward"]`.
- It checks little of what it is given, so actions, options and the order of calls are checked on this side.
"""

import difflib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import envpool
import envpool.registration
import numpy as np

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

# Options of EnvPool that are not the user's to set here: the adapter's arguments decide them.
_RESERVED = {
    "num_envs": "set the number of environments instead",
    "batch_size": "all environments step together",
    "num_threads": "set the number of threads instead",
    "seed": "set the seed of the run instead",
    "env_seed": "set the seed of the run instead",
    "max_num_players": "only single-player tasks are supported",
    "gym_reset_return_info": "it has no effect",
    "base_path": "set the environment variable ENVPOOL_ASSETS_PATH instead",
}
_PIXEL_OPTIONS = ("render_width", "render_height", "render_camera_id")
# Zero of any of these kills the process inside EnvPool or gives episodes without steps.
_POSITIVE = {"frame_skip", "frame_stack", "stack_num", "noop_max", "img_height", "img_width", "max_episode_steps"}
# Families and tasks that do not end at max_episode_steps, and the one among them that does.
_FAMILIES_WITHOUT_LIMIT = ("envpool.jumanji", "envpool.highway", "envpool.pgx")
_TASKS_WITHOUT_LIMIT = ("Catch", "CliffWalking", "Blackjack")
_TASK_WITH_LIMIT = "Sokoban"
# Reports the end of a game longer than max_episode_steps as truncated, though it does not end games there.
_FALSE_LIMIT = "Game2048-v1"
_NARROW = {"float64": "float32", "int64": "int32"}


class _Source(NamedTuple):
    """Where an observation stands in what EnvPool returns, and what becomes of it."""

    from_info: bool
    path: tuple[str, ...]
    spec: ArraySpec


def make_spec(name: str, task: str, options: Mapping[str, Any]) -> EnvSpec:
    """The spec of EnvPool's `task`, without making an environment.

    Args:
      name: the configured name, for `EnvSpec.name`.
      task: EnvPool's name of it.
      options: the task's options.

    Raises:
      EnvironmentConfigError: no such task or option, or one that is not supported.
    """
    return _env_spec(name, _task_spec(name, task, options))


class EnvPoolEnvironments:
    """`Environments` of one EnvPool task; environment `i` is seeded with `seed + i`."""

    def __init__(
        self, name: str, task: str, options: Mapping[str, Any], num_environments: int, seed: int, threads: int
    ) -> None:
        task_spec = _task_spec(name, task, options)
        self.spec = _env_spec(name, task_spec)
        self.num_environments = num_environments
        if task.removeprefix("Jumanji/") == _FALSE_LIMIT:
            options = {**options, "max_episode_steps": 2**31 - 1}
        with _quiet_spaces():
            self._pool: Any = envpool.make_gymnasium(
                task, num_envs=num_environments, seed=seed, num_threads=threads, **options
            )
            # EnvPool makes them on first use, with the same warnings.
            _ = self._pool.observation_space, self._pool.action_space
        self._name = name
        self._sources = _sources(task_spec)
        self._has_terminated = "info:terminated" in task_spec._state_keys
        self._has_raw_reward = "info:reward" in task_spec._state_keys
        self._episodic_life = bool(getattr(task_spec.config, "episodic_life", False))
        self._turn = Turn()
        self._check_action = ActionCheck(self.spec.action, num_environments)
        self._episodes = EpisodeCounter(num_environments)
        self._done = np.zeros(num_environments, bool)

    def reset(self) -> Step:
        self._turn.reset()
        observation, info = self._pool.reset()
        self._episodes.reset()
        self._done = np.zeros(self.num_environments, bool)
        no, yes = np.zeros_like(self._done), np.ones_like(self._done)
        reward = np.zeros(self.num_environments, np.float32)
        return Step(self._observation(observation, info), yes, reward, no, no.copy(), no.copy(), [])

    def send(self, action: np.ndarray) -> None:
        action = self._check_action(action)
        self._turn.send()
        self._pool.send(action)

    def recv(self) -> Step:
        self._turn.recv()
        observation, reward, terminated, truncated, info = self._pool.recv()
        is_first, self._done = self._done, terminated | truncated
        valid = ~is_first
        reward = reward.astype(np.float32, copy=False)
        over = self._done
        if self._has_terminated:
            game_over = self._done & (info["terminated"] != 0)
            terminated, truncated = terminated | game_over, truncated & ~game_over
            if self._episodic_life:
                over = game_over | truncated
        unclipped = info["reward"] if self._has_raw_reward else reward
        episodes = self._episodes.add(unclipped, valid, over)
        observation = self._observation(observation, info)
        return Step(observation, is_first, reward, terminated, truncated, valid, episodes)

    def step(self, action: np.ndarray) -> Step:
        self.send(action)
        return self.recv()

    def render(self) -> np.ndarray:
        try:
            picture: np.ndarray = self._pool.render(env_ids=0)[0]
        except (RuntimeError, ValueError) as error:
            raise EnvironmentConfigError(f"environment {self._name!r}: EnvPool says {error}") from error
        return picture

    def close(self) -> None:
        if self._turn.close():
            self._pool.close()
            # The threads of the pool end with the object.
            self._pool = None

    def _observation(self, observation: Any, info: dict[str, Any]) -> PyTree:
        if len(self._sources) == 1:
            (source,) = self._sources.values()
            return np.ascontiguousarray(observation, source.spec.dtype)
        result = {}
        for key, (from_info, path, spec) in self._sources.items():
            array = info if from_info else observation
            for part in path:
                array = array[part]
            result[key] = np.ascontiguousarray(array, spec.dtype)
        return result


def names(word: str) -> list[str]:
    """EnvPool's tasks with `word` in their name (whatever the case), as configured."""
    return sorted(f"envpool:{task}" for task in envpool.list_all_envs() if word.lower() in task.lower())


@contextmanager
def _quiet_spaces() -> Iterator[None]:
    """Within it, gymnasium does not complain about the float64 bounds of EnvPool's spaces."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered.*", category=UserWarning)
        yield


def _task_spec(name: str, task: str, options: Mapping[str, Any]) -> Any:
    """EnvPool's own spec of a task, once it is known to exist and to take these options."""
    if task not in (tasks := envpool.list_all_envs()):
        near = difflib.get_close_matches(task, tasks, n=3, cutoff=0.5)
        hint = f"; near are {', '.join(f'envpool:{n}' for n in near)}" if near else ""
        raise EnvironmentConfigError(f"environment {name!r}: EnvPool has no task {task!r}{hint}")
    try:
        default = envpool.make_spec(task)
        _check_options(name, options, default.config._asdict(), _ignores_limit(task))
        spec = envpool.make_spec(task, **options)
    except EnvironmentConfigError:
        raise
    except (TypeError, ValueError, AssertionError, ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise EnvironmentConfigError(
            f"environment {name!r} with options {dict(options)}: EnvPool says {reason}"
        ) from error
    if spec.config.max_num_players > 1:
        raise EnvironmentConfigError(
            f"environment {name!r} has {spec.config.max_num_players} players; only single-player tasks are supported"
        )
    if getattr(spec.config, "episodic_life", False) and "info:terminated" not in spec._state_keys:
        raise EnvironmentConfigError(
            f"environment {name!r}: episodic_life=True is not supported, because the task does not tell a lost life "
            "from a lost game; allowed is False"
        )
    return spec


def _ignores_limit(task: str) -> bool:
    base = task.rpartition("/")[2]
    family = envpool.registration.registry.specs[task][0]
    without = family in _FAMILIES_WITHOUT_LIMIT and not base.startswith(_TASK_WITH_LIMIT)
    return without or base.startswith(_TASKS_WITHOUT_LIMIT)


def _check_options(name: str, options: Mapping[str, Any], defaults: dict[str, Any], ignores_limit: bool) -> None:
    """EnvPool names neither the unknown option's neighbours nor the value of a wrong type."""
    reserved = _RESERVED | ({"max_episode_steps": "the task ignores it"} if ignores_limit else {})
    allowed = [key for key in defaults if key not in reserved]
    pixels = ("from_pixels", *_PIXEL_OPTIONS) if options.get("from_pixels") else ("from_pixels",)
    for key, value in options.items():
        if key in reserved:
            raise EnvironmentConfigError(f"environment {name!r}: option {key!r} is not allowed: {reserved[key]}")
        if key in pixels:
            continue
        if key == "render_mode":
            if value != "rgb_array":
                raise EnvironmentConfigError(
                    f"environment {name!r}: option {key!r} is {value!r}, allowed is 'rgb_array'"
                )
            continue
        if key not in defaults:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise EnvironmentConfigError(
                f"environment {name!r} has no option {key!r}: {hint}Allowed are {', '.join(sorted(allowed))}"
            )
        kind = type(defaults[key])
        fits = isinstance(value, (int, float) if kind is float else kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise EnvironmentConfigError(
                f"environment {name!r}: option {key!r} is {value!r}, allowed is {kind.__name__}, as its default "
                f"{defaults[key]!r}"
            )
        if key in _POSITIVE and value < 1:
            raise EnvironmentConfigError(f"environment {name!r}: option {key!r} is {value!r}, allowed is 1 or more")


def _env_spec(name: str, task_spec: Any) -> EnvSpec:
    sources = _sources(task_spec)
    observation: Any = {key: source.spec for key, source in sources.items()}
    action = _action_spec(name, task_spec)
    mask = observation.get("action_mask")
    # Masks of several choices at once (Minesweeper's is over rows and columns jointly) stay plain observations.
    masked = isinstance(action, DiscreteActions) and mask and mask.shape == (action.num_values,)
    threshold = task_spec.reward_threshold
    return EnvSpec(
        name=name,
        observation=observation if len(observation) > 1 else next(iter(observation.values())),
        action=action,
        action_mask="action_mask" if masked else None,
        frame_skip=int(getattr(task_spec.config, "frame_skip", 1)),
        stop_at_return=None if threshold is None else float(threshold),
    )


def _sources(task_spec: Any) -> dict[str, _Source]:
    """The observations of a task by their names here; nested ones are flattened with "/"."""
    sources = {}
    for key, array in task_spec.state_array_spec.items():
        kind, _, rest = key.partition(":")
        if kind != "obs" and key != "info:legal_action_mask":
            continue
        dtype = np.dtype(array.dtype).name
        spec = ArraySpec(_shape(array), np.dtype(_NARROW.get(dtype, dtype)))
        if kind == "info":
            sources["action_mask"] = _Source(True, ("legal_action_mask",), spec)
        else:
            path = tuple(rest.split(".")) if rest else ()
            sources["/".join(path) or "observation"] = _Source(False, path, spec)
    return sources


def _action_spec(name: str, task_spec: Any) -> ActionSpec:
    actions = {key: a for key, a in task_spec.action_array_spec.items() if not key.endswith("env_id")}
    if len(actions) != 1:
        raise EnvironmentConfigError(
            f"environment {name!r} takes several actions at once ({', '.join(actions)}); allowed is one"
        )
    (array,) = actions.values()
    shape, kind = _shape(array), np.dtype(array.dtype).kind
    if len(shape) > 1 or (kind == "f" and len(shape) != 1):
        raise EnvironmentConfigError(f"environment {name!r} takes actions of shape {shape}; allowed is a vector")
    low, high = (np.broadcast_to(bound, shape) for bound in (array.minimum, array.maximum))
    if kind == "f":
        with np.errstate(over="ignore"):  # unbounded actions have bounds beyond float32
            return ContinuousActions(*(tuple(map(float, bound.astype(np.float32))) for bound in (low, high)))
    if np.any(low != 0):
        raise EnvironmentConfigError(f"environment {name!r} takes actions from {low.min()}; allowed is from 0")
    if shape:
        return MultiDiscreteActions(tuple(int(n) + 1 for n in high))
    return DiscreteActions(int(high) + 1)


def _shape(array: Any) -> tuple[int, ...]:
    """Without the leading -1, which stands for the players of an environment."""
    return tuple(array.shape[1:] if array.shape and array.shape[0] == -1 else array.shape)
