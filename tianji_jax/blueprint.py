"""What both ends of a run derive from its configuration, each for itself: the agent, the environment, the arrays that
travel between them."""

import hashlib
import os
from dataclasses import dataclass
from functools import partial

import jax
import zmq

from tianji_jax.actor import Actor, acting_spec
from tianji_jax.agent import Agent
from tianji_jax.config import Config, ConfigError, agent_class, agent_settings
from tianji_jax.environments import EnvironmentConfigError, make, make_spec
from tianji_jax.transport import Codec, ParameterClient, TrajectoryClient
from tianji_jax.types import EnvSpec, PyTree, trajectory_spec


@dataclass(frozen=True)
class Addresses:
    """Where a learner listens."""

    trajectories: str
    parameters: str


@dataclass(frozen=True)
class Blueprint:
    """A configuration that has been found to fit together.

    Attributes:
      config: the configuration.
      agent: the agent.
      env_spec: what it plays.
      trajectory: spec of a trajectory, `ArraySpec` leaves.
      params: spec of what the actors need of the training state, `ArraySpec` leaves.
    """

    config: Config
    agent: Agent
    env_spec: EnvSpec
    trajectory: PyTree
    params: PyTree

    def trajectory_codec(self) -> Codec:
        """How trajectories are written on the wire."""
        return Codec(self.trajectory, _fingerprint(self.trajectory))

    def parameter_codec(self) -> Codec:
        """How parameters are written on the wire."""
        return Codec(self.params, _fingerprint(self.params))


def plan(config: Config) -> Blueprint:
    """Check that agent and environment exist and go together.

    Raises:
      ConfigError: they do not; the message says what would.
    """
    try:
        env_spec = make_spec(config.environment.name, config.environment.options)
    except EnvironmentConfigError as error:
        raise ConfigError(str(error)) from None
    cls = agent_class(config)
    try:
        agent = cls(agent_settings(config), env_spec)
        params, extras, state = acting_spec(agent, env_spec.observation)
    except ValueError as error:
        raise ConfigError(f"agent {config.agent['name']!r} and environment {env_spec.name!r}: {error}") from error
    actors = config.actors
    trajectory = trajectory_spec(env_spec, actors.unroll_length, actors.environments, extras, state)
    return Blueprint(config, agent, env_spec, trajectory, params)


def make_actor(blueprint: Blueprint, actor_id: int, device: jax.Device) -> Actor:
    """The actor `actor_id`, its environments not yet started."""
    config, actors = blueprint.config, blueprint.config.actors
    pools = 2 if actors.double_buffered else 1
    size = actors.environments // pools
    threads = actors.environment_threads or max(1, (os.cpu_count() or 1) // (actors.count * pools))
    # EnvPool seeds its environments from `seed` upwards; no two of a run may share one, nor those of two runs whose
    # seeds differ.
    first_seed = (config.run.seed * actors.count + actor_id) * actors.environments
    environments = [
        partial(
            make,
            config.environment.name,
            config.environment.options,
            num_environments=size,
            seed=(first_seed + pool * size) % 2**31,
            threads=threads,
        )
        for pool in range(pools)
    ]
    return Actor(
        blueprint.agent, environments, blueprint.trajectory, device, config.run.seed, actor_id, config.run.deterministic
    )


def connect(
    blueprint: Blueprint, actor_id: int, addresses: Addresses, context: zmq.Context
) -> tuple[TrajectoryClient, ParameterClient]:
    """The actor's two clients; they belong to the thread that calls this."""
    return (
        TrajectoryClient(addresses.trajectories, actor_id, blueprint.trajectory_codec(), context),
        ParameterClient(
            addresses.parameters, blueprint.parameter_codec(), context, exact=blueprint.config.run.deterministic
        ),
    )


def _fingerprint(spec: PyTree) -> str:
    leaves, treedef = jax.tree.flatten(spec)
    return hashlib.sha256(f"{treedef} {[str(leaf) for leaf in leaves]}".encode()).hexdigest()[:16]
