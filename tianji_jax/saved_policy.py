"""The policy of a run, read from its checkpoints onto the CPU of this process; the run may be training meanwhile."""

from pathlib import Path
from typing import Any, NamedTuple

import jax

from tianji_jax.agent import Agent, CanBeGreedy
from tianji_jax.blueprint import plan
from tianji_jax.checkpoint import restore
from tianji_jax.config import Config, ConfigError, load
from tianji_jax.learner import init_state
from tianji_jax.parallel import Parallel
from tianji_jax.run_folder import CONFIG
from tianji_jax.types import EnvSpec, PyTree


class SavedPolicy(NamedTuple):
    """A policy and what it was trained for.

    Attributes:
      config: of the run.
      agent: the agent.
      env_spec: what it plays.
      version: the policy version.
      params: what the agent acts with, on the CPU.
    """

    config: Config
    agent: Agent
    env_spec: EnvSpec
    version: int
    params: PyTree

    @property
    def can_be_greedy(self) -> bool:
        """Whether it can be played without exploring."""
        return isinstance(self.agent, CanBeGreedy)

    def require_greedy(self) -> None:
        """
        Raises:
          ConfigError: the agent can only be sampled.
        """
        if not self.can_be_greedy:
            raise ConfigError(f"agent.name: {self.config.agent['name']} has no act_greedy, so it can only be sampled")


def load_policy(run: Path, *, best: bool = False) -> SavedPolicy:
    """Read the policy of the newest checkpoint, or of the best; writes nothing.

    Args:
      run: the run's folder.
      best: the checkpoint with the highest mean return of 100 episodes.

    Raises:
      ConfigError: there is no such run or checkpoint, or its agent or environment cannot be made here.
    """
    if not (run / CONFIG).is_file():
        raise ConfigError(f"{run} is no run: {CONFIG} is missing")
    config = load(run / CONFIG)
    blueprint = plan(config)
    agent: Any = blueprint.agent
    one = Parallel(jax.local_devices(backend="cpu")[:1], "shard_map")
    saved = restore(run, one.spec(jax.eval_shape(lambda: init_state(agent, 0))), best=best)
    return SavedPolicy(config, agent, blueprint.env_spec, saved.version, agent.actor_params(saved.state.train_state))
