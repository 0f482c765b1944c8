"""What both ends of a run derive from its configuration, each for itself: the agent, the environment, the arrays that
travel between them."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import zmq

from tianji_jax.actor import Actor, Role, acting_spec
from tianji_jax.agent import Agent
from tianji_jax.config import Config, ConfigError, agent_class, agent_settings, flatten
from tianji_jax.environments import EnvironmentConfigError, Environments, make, make_spec
from tianji_jax.lock_step import Schedule
from tianji_jax.transport import (
    ID_LIMIT,
    Authenticator,
    ClientKeys,
    Codec,
    KeyFileError,
    Outside,
    ParameterClient,
    ParameterServer,
    ServerKeys,
    TrajectoryClient,
    TrajectoryServer,
    is_loopback,
    load_client_keys,
    load_server_keys,
)
from tianji_jax.types import EnvSpec, PyTree, trajectory_spec
from tianji_jax.world import ALONE, World

T = TypeVar("T")

SEEDS_BETWEEN_LIVES = 7919
"""A life of an actor is seeded like a run whose seed is so much higher: more than anybody's runs differ by."""


@dataclass(frozen=True)
class Addresses:
    """Where a learner listens."""

    trajectories: str
    parameters: str

    @classmethod
    def at(cls, listen: str) -> "Addresses":
        """Those that `actors.listen` stands for: `tcp://HOST:PORT`, and the port after it."""
        host, _, port = listen.rpartition(":")
        return cls(listen, f"{host}:{int(port) + 1}")


@dataclass(frozen=True)
class Servers:
    """A learner's ends of the streams. Each has a thread of its own: close them when those have ended.

    Attributes:
      trajectories: served by the receiver.
      parameters: `parameters.serve`.
      authenticator: `authenticator.run`; None where no keys are used.
    """

    trajectories: TrajectoryServer
    parameters: ParameterServer
    authenticator: Authenticator | None

    def close(self) -> None:
        """Close all sockets."""
        self.trajectories.close()
        self.parameters.close()
        if self.authenticator is not None:
            self.authenticator.close()


@dataclass(frozen=True)
class Blueprint:
    """A configuration that has been found to fit together.

    Attributes:
      config: the configuration.
      agent: the agent.
      env_spec: what it plays.
      trajectory: spec of a trajectory, `ArraySpec` leaves.
      params: spec of what the actors need of the training state, `ArraySpec` leaves.
      world: which learner of the run this is, or acts for.
    """

    config: Config
    agent: Agent
    env_spec: EnvSpec
    trajectory: PyTree
    params: PyTree
    world: World = ALONE

    def trajectory_codec(self) -> Codec:
        """How trajectories are written on the wire."""
        return Codec(self.trajectory, _common_settings(self.config))

    def parameter_codec(self) -> Codec:
        """How parameters are written on the wire."""
        return Codec(self.params, _common_settings(self.config), self.config.actors.parameters == "bfloat16")


def plan(config: Config, world: World = ALONE) -> Blueprint:
    """Check that agent and environment exist and go together, and that nobody listens to strangers by accident.

    Raises:
      ConfigError: they do not, or somebody would; the message says what would do.
    """
    if config.actors.listen is not None:
        _check_secured(config, f"actors.listen: {config.actors.listen}", config.actors.listen)
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
    return Blueprint(config, agent, env_spec, trajectory, params, world)


def make_actor(blueprint: Blueprint, actor_id: int, device: jax.Device, start: int = 0) -> Actor:
    """The actor `actor_id` in the life that `start` tells from others (`Role.start`); nothing of it runs yet."""
    config, actors, world = blueprint.config, blueprint.config.actors, blueprint.world
    # Actors that learners start are numbered through; others have ids so high and random that none is another's.
    number = world.rank * actors.count + actor_id
    pools = 2 if actors.double_buffered else 1
    size = actors.environments // pools
    threads = actors.environment_threads or max(1, (os.cpu_count() or 1) // (max(1, actors.count) * pools))

    def environments(start: int) -> list[Environments]:
        # EnvPool seeds its environments from `seed` upwards; no two of a run may share one, nor those of two runs whose
        # seeds differ a little, nor those of one actor's lives.
        life = config.run.seed + SEEDS_BETWEEN_LIVES * start
        first = (life * max(1, actors.count * world.size) + number) * actors.environments
        return [
            make(
                config.environment.name,
                config.environment.options,
                num_environments=size,
                seed=(first + pool * size) % (2**31 - size),
                threads=threads,
            )
            for pool in range(pools)
        ]

    role = Role(actor_id, number, config.run.seed, start, schedule(config))
    return Actor(blueprint.agent, environments, blueprint.trajectory, device, role)


def schedule(config: Config) -> Schedule | None:
    """The schedule of a run in lock-step; None for one that is not."""
    if not config.run.deterministic:
        return None
    return Schedule(
        config.actors.count,
        config.learner.trajectories_per_update,
        config.staleness.max_lag,
        config.checkpoint.every_learner_steps or 0,
    )


def connect(
    blueprint: Blueprint, actor_id: int, addresses: Addresses, context: zmq.Context
) -> tuple[TrajectoryClient, ParameterClient]:
    """The actor's two clients; they belong to the thread that calls this.

    Raises:
      ConfigError: the learner is on another host, and the keys for it are missing or cannot be used.
    """
    config = blueprint.config
    keys = client_keys(config, addresses)
    return (
        TrajectoryClient(addresses.trajectories, actor_id, blueprint.trajectory_codec(), context, keys),
        ParameterClient(
            addresses.parameters, blueprint.parameter_codec(), context, exact=config.run.deterministic, keys=keys
        ),
    )


def client_keys(config: Config, addresses: Addresses) -> ClientKeys | None:
    """What an actor needs to connect to `addresses`; None where nothing is.

    Raises:
      ConfigError: keys are needed and missing, or cannot be used.
    """
    if not addresses.trajectories.startswith("tcp://"):
        return None
    _check_secured(config, f"the learner's address {addresses.trajectories}", addresses.trajectories)
    return None if config.security.keys is None else _load(load_client_keys, config.security.keys)


def server_keys(config: Config) -> ServerKeys | None:
    """What a learner needs to listen at `actors.listen`; None where nothing is.

    Raises:
      ConfigError: keys cannot be used.
    """
    if config.actors.listen is None or config.security.keys is None:
        return None
    return _load(load_server_keys, config.security.keys)


def group_keys(config: Config) -> ServerKeys | None:
    """One pair for the root and all groups; None where `groups.root` is on loopback and nobody has made keys.

    Raises:
      ConfigError: keys are needed and missing, or cannot be used.
    """
    if config.groups.root is None:
        return None
    _check_secured(config, f"groups.root: {config.groups.root}", config.groups.root)
    return None if config.security.keys is None else _load(load_server_keys, config.security.keys)


def listen(blueprint: Blueprint, keys: ServerKeys | None, local: Addresses, context: zmq.Context, keep: int) -> Servers:
    """The learner's servers, at their local addresses and at `actors.listen`.

    Args:
      blueprint: of the run.
      keys: from `server_keys`.
      local: addresses for the actors that the learner starts itself.
      context: of all sockets of the process.
      keep: versions of the parameters that stay to be asked for.

    Raises:
      ConfigError: `actors.listen` is taken, or no address of this host.
    """
    config = blueprint.config
    outside = _outside(config, keys)
    with contextlib.ExitStack() as undo:
        authenticator = None
        if keys is not None:
            directory = config.security.keys
            assert directory is not None  # where there are keys
            authenticator = Authenticator(
                keys.clients, context, lambda: load_server_keys(directory.expanduser()).clients
            )
            undo.callback(authenticator.close)
        try:
            trajectories = TrajectoryServer(local.trajectories, blueprint.trajectory_codec(), context, outside[0])
            undo.callback(trajectories.close)
            codec = blueprint.parameter_codec()
            parameters = ParameterServer(local.parameters, codec, context, keep, outside[1])
        except zmq.ZMQError as error:
            raise ConfigError(
                f"actors.listen: cannot listen at {config.actors.listen} and the port after it: {error.strerror}"
            ) from error
        undo.pop_all()
    return Servers(trajectories, parameters, authenticator)


def _outside(config: Config, keys: ServerKeys | None) -> tuple[Outside, Outside] | tuple[None, None]:
    if config.actors.listen is None:
        return None, None
    # The ids below are those of the learner's own actors. In lock-step each trajectory has its place in the order of
    # a known number of actors, and no others can take part.
    ids = range(0) if config.run.deterministic else range(config.actors.count, ID_LIMIT)
    both = Addresses.at(config.actors.listen)
    trajectories, parameters = (
        Outside(address, keys, config.security.allow_plaintext, ids) for address in (both.trajectories, both.parameters)
    )
    return trajectories, parameters


def _check_secured(config: Config, what: str, address: str) -> None:
    security = config.security
    if security.keys is None and not security.allow_plaintext and not is_loopback(address):
        raise ConfigError(
            f"{what} is beyond this host, which needs keys: make them with `tianji keys new DIR` and set "
            "security.keys=DIR on both sides. In a network where everybody may read along and take part, "
            "security.allow_plaintext=true does without"
        )


def _load(load: Callable[[Path], T], directory: Path) -> T:
    try:
        return load(directory.expanduser())
    except KeyFileError as error:
        raise ConfigError(f"security.keys: {error}") from None


def _common_settings(config: Config) -> dict[str, Any]:
    """What an actor's configuration must have in common with its learner's, by dotted name."""
    tree = config.model_dump(mode="json")
    common = {
        "environment": {key: tree["environment"][key] for key in ("name", "options")},
        "actors": {key: tree["actors"][key] for key in ("environments", "unroll_length", "parameters")},
        "run": {"deterministic": config.run.deterministic},
        "agent": tree["agent"],
    }
    if config.run.deterministic:
        # What decides which version acts when, and what is drawn.
        common["run"]["seed"] = config.run.seed
        common["actors"] |= {key: tree["actors"][key] for key in ("count", "double_buffered")}
        common["learner"] = {"trajectories_per_update": config.learner.trajectories_per_update}
        common["staleness"] = {"max_lag": config.staleness.max_lag}
        common["checkpoint"] = {"every_learner_steps": config.checkpoint.every_learner_steps}
    return dict(flatten(common))
