"""Environments by name: the one place for auto-reset, truncation and lives.

- `envpool:Pong-v5`: a task of EnvPool; options are its configuration keys (`episodic_life`, `img_height` ...).
- `gymnasium:Acrobot-v1`: an environment registered with gymnasium; options are `gymnasium.make`'s keywords.
- `package.module:Class`: a `gymnasium.Env` of your own, or a function that makes one; options are its keywords.
"""

from collections.abc import Mapping
from typing import Any

from tianji_jax.environments import envpool
from tianji_jax.environments import gymnasium as gym
from tianji_jax.environments.base import EnvironmentConfigError, Environments, Step
from tianji_jax.types import EnvSpec

__all__ = ["EnvironmentConfigError", "Environments", "Step", "make", "make_spec", "names"]


def make(name: str, options: Mapping[str, Any], num_environments: int, seed: int, threads: int) -> Environments:
    """Make `num_environments` environments that step together.

    Args:
      name: as above.
      options: of the environment.
      num_environments: `B`, at least 1.
      seed: environment `i` is seeded with `seed + i`; space the seeds of two sets by their number of environments.
      threads: that step EnvPool's environments; 0 lets EnvPool choose. Environments in Python step in the caller's.

    Raises:
      EnvironmentConfigError: no such environment or option, or one that is not supported.
    """
    if num_environments < 1:
        raise EnvironmentConfigError(f"num_environments is {num_environments}, allowed is 1 or more")
    if threads < 0:
        raise EnvironmentConfigError(f"threads is {threads}, allowed is 1 or more, or 0 to let EnvPool choose")
    highest = 2**31 - num_environments
    if not 0 <= seed <= highest:
        raise EnvironmentConfigError(f"seed is {seed}, allowed is 0 to {highest} for {num_environments} environments")
    prefix, rest = _split(name)
    if prefix == "envpool":
        return envpool.EnvPoolEnvironments(name, rest, options, num_environments, seed, threads)
    return gym.GymnasiumEnvironments(name, options, num_environments, seed)


def make_spec(name: str, options: Mapping[str, Any]) -> EnvSpec:
    """What an agent may know of an environment; cheap for EnvPool's, one environment is made and closed for others.

    Raises:
      EnvironmentConfigError: no such environment or option, or one that is not supported.
    """
    prefix, rest = _split(name)
    return envpool.make_spec(name, rest, options) if prefix == "envpool" else gym.make_spec(name, options)


def names(word: str = "") -> list[str]:
    """The environments of EnvPool and gymnasium with `word` in their name, as they are configured."""
    return envpool.names(word) + gym.names(word)


def _split(name: str) -> tuple[str, str]:
    prefix, colon, rest = name.partition(":")
    if not colon:
        raise EnvironmentConfigError(
            f"environment {name!r} does not say where it comes from: use 'envpool:{name}', 'gymnasium:{name}' or, for "
            "your own, 'package.module:Class'"
        )
    return prefix, rest
