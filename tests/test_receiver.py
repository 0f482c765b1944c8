"""The learner's door, with real sockets: what comes late is taken where there is room, and all of it is counted."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import jax
import numpy as np
import pytest
import zmq

from tianji_jax.attendance import Attendance
from tianji_jax.balance import Balance
from tianji_jax.config import ActorsConfig
from tianji_jax.metrics import Meter
from tianji_jax.receiver import Pipeline, Receiver
from tianji_jax.staleness import Ledger, StalenessFilter
from tianji_jax.transport import Codec, Credit, TrajectoryClient, TrajectoryServer
from tianji_jax.types import ArraySpec, DiscreteActions, EnvSpec, Stamp, Trajectory, trajectory_spec
from tianji_jax.worker import Workers

ENV = EnvSpec("test", ArraySpec((2,), np.dtype(np.float32)), DiscreteActions(2))
CODEC = Codec(trajectory_spec(ENV, 3, 2, {}, ()), {})
HANG_SECONDS = 0.3


def trajectory() -> Trajectory:
    return jax.tree.map(lambda spec: np.ones(spec.shape, spec.dtype), CODEC.spec)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Rig:
    """A receiver that runs; the test plays the actors and the learner."""

    def __init__(self, context: zmq.Context, max_lag: int, trajectories: int) -> None:
        self.context = context
        self.pipeline = Pipeline(StalenessFilter(max_lag, max_lag), Balance(max_lag, trajectories), Meter(), Ledger())
        self.pipeline.published = 0
        self.attendance = Attendance(ActorsConfig(hang_seconds=HANG_SECONDS))
        self.server = TrajectoryServer("inproc://receiver", CODEC, context)
        self.receiver = Receiver(self.server, self.pipeline, self.attendance)
        self.workers = Workers()
        self.workers.start("receiver", self.receiver.run)

    def actor(self, actor_id: int) -> "Player":
        return Player(TrajectoryClient(self.server.endpoint, actor_id, CODEC, self.context), actor_id)

    def consume(self) -> Stamp:
        """Learn from the oldest trajectory; the version stays as it is."""
        arrival = self.receiver.ready.get(timeout=5)
        self.pipeline.ledger.consume(1)
        self.pipeline.release(1)
        return arrival.stamp

    def counts(self) -> tuple[int, int, int, int]:
        counts = self.pipeline.ledger.counts
        assert counts.received == counts.consumed + counts.dropped + counts.rejected + counts.queued
        return counts.consumed, counts.dropped, counts.rejected, counts.queued


class Player:
    """An actor that does what the test says."""

    def __init__(self, client: TrajectoryClient, actor_id: int) -> None:
        self.client, self.actor_id = client, actor_id
        self._sequence = 0
        self.client.hello(threading.Event(), 5)

    def ask(self, number: int) -> None:
        for _ in range(number):
            self.client.request()

    def credits(self, number: int) -> None:
        assert [self.client.credit(5) for _ in range(number)] == [Credit(0)] * number

    def send(self) -> None:
        self.client.send(Stamp(0, self.actor_id, self._sequence), trajectory(), [], {})
        self._sequence += 1


@contextmanager
def rig(max_lag: int = 0, trajectories: int = 2) -> Iterator[Rig]:
    context = zmq.Context()
    made = Rig(context, max_lag, trajectories)
    try:
        yield made
        made.workers.check()
    finally:
        assert made.workers.close(5) == []
        made.server.close()
        context.destroy(linger=0)


def acting(made: Rig, player: Player) -> None:
    """Two trajectories that are learned from, so that the actor is known to be quick."""
    for _ in range(2):
        player.ask(1)
        player.credits(1)
        player.send()
        made.consume()


def test_late_trajectories_are_taken_where_there_is_room_and_otherwise_dropped_and_counted() -> None:
    with rig() as made, closing((slow := made.actor(0)).client), closing((quick := made.actor(1)).client):
        acting(made, slow)
        slow.ask(2)
        slow.credits(2)
        quick.ask(2)
        quick.credits(2)  # which were those of the other
        assert made.attendance.hung == 1
        quick.send()
        until(lambda: made.counts() == (2, 0, 0, 1))
        slow.send()  # one waits and one is out: no room
        until(lambda: made.counts() == (2, 1, 0, 1))
        assert made.attendance.hung == 0
        assert made.consume() == Stamp(0, 1, 0)
        slow.send()
        until(lambda: made.counts() == (3, 1, 0, 1))
        assert made.consume() == Stamp(0, 0, 3)
        quick.send()
        assert made.consume() == Stamp(0, 1, 1)
        assert made.counts() == (5, 1, 0, 0)
        assert made.pipeline.balance.outstanding == 0
        # Steps of a trajectory that was dropped were taken all the same.
        assert made.pipeline.meter.environment_steps == 6
        slow.ask(1)
        slow.credits(1)


def test_a_trajectory_lost_on_the_way_does_not_leave_its_actor_without_credit_for_ever() -> None:
    with rig(trajectories=1) as made, closing((actor := made.actor(0)).client):
        acting(made, actor)
        actor.ask(1)
        actor.credits(1)
        actor.client._sequence += 1  # as if it had been sent and never come
        actor._sequence += 1
        actor.ask(1)
        actor.credits(1)
        actor.send()
        assert made.consume() == Stamp(0, 0, 3)
        assert made.attendance.trajectories_lost == 1
        assert made.pipeline.balance.outstanding == 0


def test_one_that_cannot_be_reached_gives_what_it_holds_to_the_others() -> None:
    with rig() as made, closing((other := made.actor(1)).client):
        gone = made.actor(0)
        gone.ask(2)
        gone.credits(2)
        gone.client.close()
        other.ask(2)
        assert other.client.credit(0.5) is None
        made.attendance.departed(0)
        other.credits(2)
        assert made.attendance.connected == 1


def test_one_that_cannot_be_granted_what_it_asked_for_gives_up_what_it_holds_as_well() -> None:
    with rig() as made, closing((other := made.actor(1)).client):
        gone = made.actor(0)
        for player in (gone, other):
            player.ask(1)
            player.credits(1)
        gone.ask(1)
        gone.client.close()
        other.send()
        made.consume()
        other.ask(2)
        other.credits(2)
        assert made.attendance.connected == 1


@pytest.mark.parametrize("sent", [0, 1, 2])
def test_what_an_actor_had_when_it_begins_anew_is_counted_as_lost(sent: int) -> None:
    with rig() as made, closing((first := made.actor(0)).client):
        first.ask(2)
        first.credits(2)
        for _ in range(sent):
            first.send()
            made.consume()
        with closing((second := made.actor(0)).client):
            second.ask(2)
            second.credits(2)
            assert made.attendance.trajectories_lost == 2 - sent
            assert made.attendance.connected == 1
