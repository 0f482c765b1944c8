"""The learner's door: trajectories come in, are judged and queued; credits go out."""

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from tianji_jax.balance import Balance
from tianji_jax.device_queue import Arrival, DeviceQueue
from tianji_jax.metrics import Meter
from tianji_jax.staleness import Ledger, StalenessFilter, Verdict
from tianji_jax.transport import Arrived, Event, Joined, Lost, MessageRejected, Requested, TrajectoryServer
from tianji_jax.worker import POLL_SECONDS

logger = logging.getLogger(__name__)


class Pipeline:
    """What the receiver, the batcher and the learner share: the filter, the account, the credits, the version.

    Attributes:
      version: the learner's policy version; only the learner writes it.
    """

    def __init__(self, staleness: StalenessFilter, balance: Balance, meter: Meter) -> None:
        self.staleness = staleness
        self.balance = balance
        self.ledger = Ledger()
        self.meter = meter
        self.version = 0
        self.wake: Callable[[], None] = lambda: None

    def drop(self, arrival: Arrival) -> None:
        """A queued trajectory grew too old: its credit returns, its steps were still taken."""
        self.ledger.drop()
        self.meter.experience(arrival.steps, arrival.episodes)
        self.release(1)

    def release(self, trajectories: int) -> None:
        """Return the credits of trajectories that left the queues and let the receiver hand them out."""
        self.balance.release(trajectories)
        self.wake()


class Receiver:
    """Serves the trajectory stream. While `run` runs, no other thread touches the socket."""

    def __init__(self, server: TrajectoryServer, pipeline: Pipeline, lock_step_actors: int | None = None) -> None:
        """
        Args:
          server: the socket.
          pipeline: shared with batcher and learner.
          lock_step_actors: the number of actors when trajectories are to be released in (sequence, actor) order; None
            to release them as they come.
        """
        self._server = server
        self._pipeline = pipeline
        self._order = None if lock_step_actors is None else _Order(lock_step_actors)
        # Never full: only trajectories with a credit get in, and there are only so many credits.
        self.ready: queue.Queue[Arrival] = queue.Queue(pipeline.balance.limit)
        self._complaints: Counter[tuple[int | None, str]] = Counter()
        pipeline.wake = server.wake

    def run(self, stop: threading.Event) -> None:
        """Serve actors until `stop` is set."""
        balance = self._pipeline.balance
        while not stop.is_set():
            for event in self._server.poll(POLL_SECONDS):
                self._handle(event)
            for actor_id, credit in balance.grants(self._pipeline.version):
                if not self._server.grant(actor_id, credit):
                    balance.lose(actor_id)

    def _handle(self, event: Event) -> None:
        balance = self._pipeline.balance
        match event:
            case Joined(actor_id):
                balance.leave(actor_id)
            case Requested(actor_id):
                balance.request(actor_id)
            case Lost(actor_id, trajectories):
                balance.lose(actor_id, trajectories)
            case MessageRejected(actor_id, reason, detail, spent):
                if spent and actor_id is not None:
                    balance.lose(actor_id)
                self._reject(actor_id, reason, detail)
            case Arrived():
                self._arrive(event)

    def _arrive(self, event: Arrived) -> None:
        pipeline, stamp = self._pipeline, event.stamp
        verdict = pipeline.staleness.judge(stamp.policy_version, pipeline.version)
        if verdict is Verdict.FUTURE:
            self._server.refetch(event.actor_id)
            pipeline.balance.lose(event.actor_id)
            detail = f"policy version {stamp.policy_version} is ahead of the learner's {pipeline.version}"
            self._reject(event.actor_id, "future", detail)
            return
        pipeline.meter.acted(event.seconds)
        pipeline.balance.arrive(event.actor_id, stamp.policy_version)
        steps = int(np.count_nonzero(event.trajectory.valid))
        arrival = Arrival(stamp, event.trajectory, event.episodes, steps)
        pipeline.ledger.queue()
        if verdict is Verdict.TOO_OLD:
            pipeline.drop(arrival)
            return
        for released in [arrival] if self._order is None else self._order.add(arrival):
            self.ready.put_nowait(released)

    def _reject(self, actor_id: int | None, reason: str, detail: str) -> None:
        self._pipeline.ledger.reject(reason)
        self._complaints[actor_id, reason] += 1
        if self._complaints[actor_id, reason] == 1:
            who = "an unknown peer" if actor_id is None else f"actor {actor_id}"
            logger.warning("rejected a message of %s (%s): %s", who, reason, detail)


class _Order:
    """Holds trajectories back until their turn in (sequence, actor) order comes."""

    def __init__(self, actors: int) -> None:
        self._actors = actors
        self._next = 0
        self._waiting: dict[int, Arrival] = {}

    def add(self, arrival: Arrival) -> Iterator[Arrival]:
        stamp = arrival.stamp
        self._waiting[stamp.sequence * self._actors + stamp.actor_id] = arrival
        while self._next in self._waiting:
            yield self._waiting.pop(self._next)
            self._next += 1


class Batcher:
    """Gathers `N` trajectories, drops those that would be too old by the time of their update, fills the queue."""

    def __init__(
        self, ready: "queue.Queue[Arrival]", devices: DeviceQueue, pipeline: Pipeline, trajectories: int
    ) -> None:
        self._ready = ready
        self._devices = devices
        self._pipeline = pipeline
        self._trajectories = trajectories

    def run(self, stop: threading.Event) -> None:
        """Batch until `stop` is set."""
        gathered: list[Arrival] = []
        while not stop.is_set():
            try:
                gathered.append(self._ready.get(timeout=POLL_SECONDS))
            except queue.Empty:
                continue
            if len(gathered) == self._trajectories:
                gathered = self._fresh_enough(gathered)
            if len(gathered) == self._trajectories:
                self._devices.put(gathered, stop)
                gathered = []

    def _fresh_enough(self, gathered: list[Arrival]) -> list[Arrival]:
        # One version passes with each batch that is ahead in the queue.
        version = self._pipeline.version + len(self._devices)
        kept = []
        for arrival in gathered:
            if self._pipeline.staleness.judge(arrival.stamp.policy_version, version) is Verdict.TOO_OLD:
                self._pipeline.drop(arrival)
            else:
                kept.append(arrival)
        return kept
