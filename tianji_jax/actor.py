"""Acting: step the environments, choose actions, fill trajectories, send them."""

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from tianji_jax.agent import Agent
from tianji_jax.environments import Environments, Step
from tianji_jax.lock_step import Schedule
from tianji_jax.transport import Credit, ParameterClient, TrajectoryClient
from tianji_jax.types import ArraySpec, Episode, PyTree, Stamp, Trajectory
from tianji_jax.worker import POLL_SECONDS

CONNECT_SECONDS = 60.0
"""How long an actor waits for its learner to answer the handshake."""

PARAMETER_SECONDS = 600.0
"""How long an actor waits for parameters; the first come when the learner has compiled its initialisation."""


class TrajectoryBuilder:
    """Fills one trajectory, some environments (a slice of `B`) and one step at a time.

    Each trajectory gets fresh buffers: the previous one may still be on its way.
    """

    def __init__(self, spec: PyTree) -> None:
        self._spec = spec
        self.unroll_length = spec.reward.shape[0]

    def begin(self, state: Sequence[tuple[slice, PyTree]]) -> None:
        """Take new buffers and note the recurrent state of each slice."""
        self.trajectory: Trajectory = jax.tree.map(lambda spec: np.empty(spec.shape, spec.dtype), self._spec)
        for where, part in state:
            jax.tree.map(lambda buffer, value, where=where: _write(buffer, where, value), self.trajectory.state, part)

    def observe(self, t: int, where: slice, step: Step) -> None:
        """What was seen before step `t` (0 to T)."""
        trajectory = self.trajectory
        jax.tree.map(
            lambda buffer, value: buffer.__setitem__((t, where), value), trajectory.observation, step.observation
        )
        trajectory.is_first[t, where] = step.is_first

    def act(self, t: int, where: slice, action: np.ndarray, extras: PyTree) -> None:
        """What was done in step `t` (0 to T - 1)."""
        self.trajectory.action[t, where] = action
        jax.tree.map(lambda buffer, value: _write(buffer[t], where, value), self.trajectory.extras, extras)

    def outcome(self, t: int, where: slice, step: Step) -> None:
        """What came of step `t` (0 to T - 1)."""
        trajectory = self.trajectory
        trajectory.reward[t, where] = step.reward
        trajectory.terminated[t, where] = step.terminated
        trajectory.truncated[t, where] = step.truncated
        trajectory.valid[t, where] = step.valid


class _Half:
    """Some of an actor's environments, which step together."""

    def __init__(self, environments: Environments, where: slice, state: PyTree) -> None:
        self.environments = environments
        self.where = where
        self.state = state
        self.step: Step


class Seconds(NamedTuple):
    """Where an actor's time went between two trajectories, in seconds.

    Attributes:
      sending: the trajectory before.
      credit: waiting for one.
      parameters: waiting for new ones and taking them over.
      environment: waiting for environments to step.
      inference: choosing actions.
      building: the rest of the unroll, which fills the trajectory.
    """

    sending: float = 0.0
    credit: float = 0.0
    parameters: float = 0.0
    environment: float = 0.0
    inference: float = 0.0
    building: float = 0.0


@dataclass(frozen=True)
class Role:
    """Which actor of a run this is, and which of its lives.

    Attributes:
      actor_id: from 0, as its learner knows it.
      number: from 0 among the actors of all learners of a run, which sample their actions independently.
      seed: of the run.
      start: different in each life of the actor, so that none repeats another; in lock-step the policy version at which
        it begins.
      schedule: of a run in lock-step: act with exactly the version a credit names, and begin anew when it says so.
    """

    actor_id: int
    number: int
    seed: int
    start: int = 0
    schedule: Schedule | None = None


class Actor:
    """Owns environments and a copy of the policy; acts as long as it is given credits.

    All methods but the constructor run on one thread, which owns the sockets of both clients.
    """

    def __init__(
        self,
        agent: Agent,
        environments: Callable[[int], Sequence[Environments]],
        spec: PyTree,
        device: jax.Device,
        role: Role,
    ) -> None:
        """
        Args:
          agent: the agent.
          environments: makes both halves of the environments (or the whole, when not double-buffered) for a `start`.
          spec: of a trajectory, `ArraySpec` leaves.
          device: where the policy runs.
          role: which actor it is.
        """
        self._agent = agent
        self._make = environments
        self._spec = spec
        self._device = device
        self._builder = TrajectoryBuilder(spec)
        self._role = role
        self._rng: jax.Array
        self._calls = 0
        self._halves: list[_Half] = []
        self._act = jax.jit(self._choose)
        # A program takes many small arrays to its device in a fifth of the time that `jax.device_put` needs.
        self._take = jax.jit(functools.partial(jax.tree.map, jnp.copy), out_shardings=SingleDeviceSharding(device))

    def run(self, trajectories: TrajectoryClient, parameters: ParameterClient, stop: threading.Event) -> None:
        """Act until `stop` is set."""
        role, schedule = self._role, self._role.schedule
        version, params, sending = -1, None, 0.0
        sequence = 0 if schedule is None else schedule.first_sequence(role.actor_id, role.start)
        try:
            trajectories.hello(stop, CONNECT_SECONDS, sequence)
            self._begin(role.start)
            trajectories.request()
            while not stop.is_set():
                began = time.perf_counter()
                credit = trajectories.credit(POLL_SECONDS)
                while credit is None and not stop.is_set():
                    credit = trajectories.credit(POLL_SECONDS)
                granted = time.perf_counter()
                if trajectories.take_refetch():
                    parameters.refetch()
                received = None if credit is None else self._fetch(parameters, credit, stop)
                if received is None:
                    return
                if received[0] != version:
                    version, params = received[0], self._take(received[1])
                if schedule is not None and self._started != schedule.beginning(
                    schedule.update(role.actor_id, sequence)
                ):
                    self._begin(version)
                # The next credit travels while this unroll is acted.
                trajectories.request()
                waits = Seconds(sending, granted - began, time.perf_counter() - granted)
                episodes, seconds = self._unroll(params, parameters, waits)
                stamp, unrolled = Stamp(version, role.actor_id, sequence), time.perf_counter()
                trajectories.send(stamp, self._builder.trajectory, episodes, seconds._asdict())
                sending = time.perf_counter() - unrolled
                sequence += 1
        finally:
            self._end()
            trajectories.close()
            parameters.close()

    def _fetch(self, parameters: ParameterClient, credit: Credit, stop: threading.Event) -> tuple[int, PyTree] | None:
        fetch = parameters.newest if self._role.schedule is None else parameters.exactly
        return fetch(credit.version, stop, PARAMETER_SECONDS)

    def _begin(self, start: int) -> None:
        """Fresh environments and keys, which `start` determines."""
        self._end()
        self._started = start
        with jax.default_device(self._device):
            self._rng, self._calls = actor_key(self._role.seed, self._role.number, start), 0
        first = 0
        for environments in self._make(start):
            count = environments.num_environments
            state = jax.device_put(self._agent.initial_state(count), self._device)
            self._halves.append(_Half(environments, slice(first, first + count), state))
            first += count
        for half in self._halves:
            half.step = half.environments.reset()

    def _end(self) -> None:
        for half in self._halves:
            half.environments.close()
        self._halves = []

    def _unroll(self, params: PyTree, parameters: ParameterClient, waits: Seconds) -> tuple[list[Episode], Seconds]:
        """Act `T` steps in all environments. While one half steps, the policy acts for the other."""
        clock = time.perf_counter
        start, environment, inference = clock(), 0.0, 0.0
        episodes: list[Episode] = []
        builder, halves = self._builder, self._halves
        builder.begin([(half.where, half.state) for half in halves])
        for half in halves:
            builder.observe(0, half.where, half.step)
        for t in range(builder.unroll_length + 1):
            parameters.poll()
            for half in halves:
                if t > 0:
                    began = clock()
                    half.step = half.environments.recv()
                    environment += clock() - began
                    builder.outcome(t - 1, half.where, half.step)
                    builder.observe(t, half.where, half.step)
                    episodes += half.step.episodes
                if t < builder.unroll_length:
                    began = clock()
                    action, extras = self._choose_for(half, params)
                    inference += clock() - began
                    half.environments.send(action)
                    builder.act(t, half.where, action, extras)
        building = clock() - start - environment - inference
        return episodes, waits._replace(environment=environment, inference=inference, building=building)

    def _choose_for(self, half: _Half, params: PyTree) -> tuple[np.ndarray, PyTree]:
        action, extras, half.state = self._act(
            params, self._rng, np.uint32(self._calls), half.step.observation, half.step.is_first, half.state
        )
        self._calls += 1
        return np.asarray(action), extras

    def _choose(
        self, params: PyTree, rng: jax.Array, call: jax.Array, observation: PyTree, is_first: jax.Array, state: PyTree
    ) -> tuple[jax.Array, PyTree, PyTree]:
        return self._agent.act(params, jax.random.fold_in(rng, call), observation, is_first, state)


def actor_key(seed: int, number: int, start: int = 0) -> jax.Array:
    """Root of an actor's action sampling in one of its lives; the learner's is number 0 of the same family."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1 + number), start)


def acting_spec(agent: Agent, observation: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """Specs (`ArraySpec` leaves, of one environment) of the agent's parameters, extras and recurrent state.

    Args:
      agent: the agent.
      observation: the environment's observation spec.
    """
    params = jax.eval_shape(lambda: agent.actor_params(agent.init(jax.random.key(0))))
    state = jax.eval_shape(lambda: agent.initial_state(1))
    batched = jax.tree.map(lambda spec: jax.ShapeDtypeStruct((1, *spec.shape), spec.dtype), observation)
    is_first = jax.ShapeDtypeStruct((1,), bool)
    rng = jax.eval_shape(lambda: jax.random.key(0))
    _, extras, _ = jax.eval_shape(agent.act, params, rng, batched, is_first, state)

    def single(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: ArraySpec(x.shape[1:], x.dtype), tree)

    return jax.tree.map(lambda x: ArraySpec(x.shape, x.dtype), params), single(extras), single(state)


def _write(buffer: np.ndarray, where: slice, value: jax.Array) -> None:
    buffer[where] = value
