"""Actors for a learner that runs elsewhere: `tianji actor`.

They may come before their learner does, and stay while it is away: one that was killed and is resumed at the same
address finds its actors waiting.
"""

import contextlib
import functools
import logging
import re
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import jax
import numpy as np
import zmq

from tianji_jax.actor_process import acting_devices
from tianji_jax.blueprint import Addresses, Blueprint, client_keys, make_actor, plan
from tianji_jax.config import Config, ConfigError
from tianji_jax.interrupts import Interrupts, interrupts
from tianji_jax.parallel import actor_device
from tianji_jax.transport import (
    ID_LIMIT,
    Credit,
    ParameterClient,
    ParameterRelay,
    ParameterServer,
    Refused,
    Rejected,
    TrajectoryClient,
    local_address,
)
from tianji_jax.types import Episode, PyTree, Stamp, Trajectory
from tianji_jax.worker import POLL_SECONDS, WorkerError, Workers

logger = logging.getLogger(__name__)

LINE_SECONDS = 10.0
"""Seconds between two lines about the actors, and of patience before one says that there is no learner."""

CLOSE_SECONDS = 3.0
"""How long actors get to end by themselves."""

FIRST_ID = 65_536
"""Ids below are those of a learner's own actors (`actors.count`)."""


class RefusedError(ConfigError):
    """The learner does not take these actors; the message is the learner's."""


@dataclass
class _Tally:
    """What one actor has done; written by its thread, read by the one that reports.

    Attributes:
      away: since when there is no learner, by the monotonic clock; None while there is one.
      met: there was one.
      trajectories: sent.
      steps: environment steps in them.
      seconds: that they took.
      waited: seconds of these in which it waited for credit or parameters.
    """

    away: float | None = field(default_factory=time.monotonic)
    met: bool = False
    trajectories: int = 0
    steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0


class _Trajectories(TrajectoryClient):
    """Waits for its learner as long as it takes."""

    tally: _Tally

    def hello(self, stop: threading.Event, timeout: float, sequence: int = 0) -> None:
        while not stop.is_set():
            try:
                super().hello(stop, timeout, sequence)
            except TimeoutError:
                continue
            break
        self.note(connected=not stop.is_set())

    def credit(self, timeout: float) -> Credit | None:
        credit = super().credit(timeout)
        if self.take_forgotten():
            self.note(connected=False)
        self.note(credit is not None or self.connected)
        return credit

    def send(self, stamp: Stamp, trajectory: Trajectory, episodes: list[Episode], seconds: dict[str, float]) -> None:
        super().send(stamp, trajectory, episodes, seconds)
        self.tally.trajectories += 1
        self.tally.steps += int(np.count_nonzero(trajectory.valid))
        self.tally.seconds += sum(seconds.values())
        self.tally.waited += seconds["credit"] + seconds["parameters"]

    def note(self, connected: bool) -> None:
        """Whether there is a learner."""
        tally = self.tally
        if not connected:
            tally.away = tally.away or time.monotonic()
            return
        if tally.away is not None:
            _say(f"actor {self.actor_id}: connected to {self.address}{' again' if tally.met else ''}")
        tally.away, tally.met = None, True


class _Parameters(ParameterClient):
    """Takes what the learner has when what a credit asked for does not come."""

    stream: _Trajectories

    def newest(self, at_least: int, stop: threading.Event, timeout: float) -> tuple[int, PyTree] | None:
        while not stop.is_set():
            try:
                return super().newest(at_least, stop, LINE_SECONDS)
            except TimeoutError:
                # The credit may be of a learner that is no more, and its successor have begun at an earlier version.
                self.refetch()
                self.stream.note(self.stream.connected)
                at_least = 0
        return None


def act(config: Config, address: str, count: int = 1, actor_id: int | None = None) -> None:
    """Act for the learner at `address` until Ctrl-C.

    Args:
      config: agreeing with the learner's in all that both need.
      address: its `actors.listen`, as seen from here.
      count: actors, each a thread.
      actor_id: of the first; None draws one.

    Raises:
      ConfigError: the configuration, the address or the id cannot be used.
      RefusedError: the learner does not take these actors.
      WorkerError: an actor failed, with its exception as the cause.
      KeyboardInterrupt: Ctrl-C, after all has been taken down.
      Preempted: SIGTERM, likewise.
    """
    addresses, first = _addresses(address), _first_id(actor_id, count)
    if config.run.deterministic:
        raise ConfigError("run.deterministic: in lock-step only the learner's own actors take part")
    # The cores of this host are shared among the actors that run here.
    config = config.model_copy(update={"actors": config.actors.model_copy(update={"count": count})})
    client_keys(config, addresses)
    with interrupts() as interruption:
        devices = acting_devices(config)
        blueprint = plan(config)
        context = zmq.Context()
        workers = Workers()
        interruption.stop_by(workers.stop)
        tallies = [_Tally() for _ in range(count)]
        with contextlib.ExitStack() as relay:
            if count > 1:
                addresses = relay.enter_context(_relayed(blueprint, addresses, context, workers))
            for number, tally in enumerate(tallies):
                device = actor_device(config.actors.device, devices, number)
                run = functools.partial(_act, blueprint, (first + number, device), addresses, context, tally)
                workers.start(f"actor {first + number}", run)
            _report_until_the_end(address, tallies, workers.stop)
            ended = not workers.close(CLOSE_SECONDS)
        if ended:
            context.destroy(linger=0)
        _check(workers, interruption)


@contextlib.contextmanager
def _relayed(blueprint: Blueprint, addresses: Addresses, context: zmq.Context, workers: Workers) -> Iterator[Addresses]:
    """Have the learner send parameters once for all actors here; where these find both streams."""
    keys = client_keys(blueprint.config, addresses)
    with local_address("inproc") as local:
        server = ParameterServer(local, blueprint.parameter_codec(), context)
        try:
            upstream = ParameterClient(addresses.parameters, blueprint.parameter_codec(), context, keys=keys)
            workers.start("parameter server", server.serve)
            workers.start("parameter relay", ParameterRelay(upstream, server).run)
            yield Addresses(addresses.trajectories, local)
        finally:
            server.close()


def _act(
    blueprint: Blueprint,
    role: tuple[int, jax.Device],
    addresses: Addresses,
    context: zmq.Context,
    tally: _Tally,
    stop: threading.Event,
) -> None:
    """One actor, on its thread."""
    actor_id, device = role
    keys = client_keys(blueprint.config, addresses)
    # A life like no other: an id may be used again, and the learner does not tell how often it was.
    actor = make_actor(blueprint, actor_id, device, start=secrets.randbelow(2**31))
    stream = _Trajectories(addresses.trajectories, actor_id, blueprint.trajectory_codec(), context, keys, patient=True)
    far = addresses.parameters.startswith("tcp://")
    parameters = _Parameters(addresses.parameters, blueprint.parameter_codec(), context, keys=keys if far else None)
    stream.tally, parameters.stream = tally, stream
    actor.run(stream, parameters, stop)


def _report_until_the_end(address: str, tallies: list[_Tally], stop: threading.Event) -> None:
    began, before = time.monotonic(), 0
    missed = False
    while not stop.wait(POLL_SECONDS):
        now = time.monotonic()
        away = min((now - tally.away if tally.away is not None else 0.0) for tally in tallies)
        if away < LINE_SECONDS:
            missed = False
        elif not missed:
            missed = True
            logger.warning(
                "no learner at %s for %.0f s: none is running there, or it does not have the same keys "
                "(security.keys of both sides), which it does not tell strangers; waiting for it",
                address,
                away,
            )
        if now - began >= LINE_SECONDS:
            steps = sum(tally.steps for tally in tallies)
            _print_line(tallies, (steps - before) / (now - began), away)
            began, before = now, steps


def _print_line(tallies: list[_Tally], rate: float, away: float) -> None:
    trajectories, seconds = sum(tally.trajectories for tally in tallies), sum(tally.seconds for tally in tallies)
    waited = sum(tally.waited for tally in tallies) / seconds if seconds else 0.0
    where = f"  no learner for {away:.0f} s" if away >= LINE_SECONDS else ""
    _say(f"trajectories {trajectories:,}  steps/s {rate:,.0f}  waiting for the learner {waited:.0%}{where}")


def _say(line: str) -> None:
    """In one piece, whichever threads speak at the same time."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _check(workers: Workers, interruption: Interrupts) -> None:
    try:
        workers.check()
    except WorkerError as error:
        if isinstance(error.__cause__, Refused | Rejected):
            raise RefusedError(f"the learner refused: {error.__cause__}") from error
        raise
    interruption.check()


def _addresses(address: str) -> Addresses:
    match = re.fullmatch(r"tcp://[^\s/]+:(\d{1,5})", address)
    if not match or not 1 <= int(match[1]) <= 65_534:
        raise ConfigError(f"--connect: got {address!r}; it should be tcp://HOST:PORT with a PORT from 1 to 65534")
    return Addresses.at(address)


def _first_id(actor_id: int | None, count: int) -> int:
    if count < 1:
        raise ConfigError(f"--count: got {count}; it should be 1 or more")
    if actor_id is None:
        return FIRST_ID + secrets.randbelow(ID_LIMIT - FIRST_ID - count)
    if not FIRST_ID <= actor_id <= ID_LIMIT - count:
        raise ConfigError(f"--id: got {actor_id}; it should be from {FIRST_ID} to {ID_LIMIT - count}")
    return actor_id
