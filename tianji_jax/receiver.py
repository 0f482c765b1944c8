"""The learner's door: trajectories come in, are judged and queued; credits go out."""

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable

import numpy as np

from tianji_jax.attendance import Attendance
from tianji_jax.balance import Balance
from tianji_jax.device_queue import Arrival, DeviceQueue
from tianji_jax.lock_step import Order
from tianji_jax.metrics import Meter
from tianji_jax.staleness import Ledger, StalenessFilter, Verdict
from tianji_jax.stopwatch import Stopwatch
from tianji_jax.timeline import Timeline
from tianji_jax.transport import Arrived, Event, Joined, Lost, MessageRejected, Requested, TrajectoryServer
from tianji_jax.worker import POLL_SECONDS

logger = logging.getLogger(__name__)


class Pipeline:
    """What the receiver, the batcher and the learner share: the filter, the account, the credits, the version.

    Attributes:
      version: the learner's policy version; only the learner writes it.
      published: the newest version that actors can have, -1 before there is any; only the publisher writes it.
    """

    def __init__(
        self, staleness: StalenessFilter, balance: Balance, meter: Meter, ledger: Ledger, version: int = 0
    ) -> None:
        self.staleness = staleness
        self.balance = balance
        self.ledger = ledger
        self.meter = meter
        self.timeline = Timeline()
        self.version = version
        self.published = -1
        self.wake: Callable[[], None] = lambda: None

    def stopwatch(self, thread: str) -> Stopwatch:
        """Times the stages of a thread."""
        return Stopwatch(thread, self.meter, self.timeline)

    def drop(self, arrival: Arrival) -> None:
        """A queued trajectory grew too old: its credit returns, its steps were still taken."""
        self.ledger.drop()
        self.meter.experience(arrival.steps, arrival.episodes)
        self.release(1)

    def turn_away(self, arrival: Arrival) -> None:
        """A trajectory came so late that others have its place: its steps were taken, nobody learns from them."""
        self.ledger.queue()
        self.ledger.drop()
        self.meter.experience(arrival.steps, arrival.episodes)

    def release(self, trajectories: int) -> None:
        """Return the credits of trajectories that left the queues and let the receiver hand them out."""
        self.balance.release(trajectories)
        self.wake()


class Receiver:
    """Serves the trajectory stream. While `run` runs, no other thread touches the socket."""

    def __init__(
        self, server: TrajectoryServer, pipeline: Pipeline, attendance: Attendance, order: Order | None = None
    ) -> None:
        """
        Args:
          server: the socket.
          pipeline: shared with batcher and learner.
          attendance: of the actors.
          order: in which trajectories are to be released (lock-step); None to release them as they come.
        """
        self._server = server
        self._pipeline = pipeline
        self._attendance = attendance
        self._order = order
        # Never full: only trajectories that count within the law get in.
        self.ready: queue.Queue[Arrival] = queue.Queue(pipeline.balance.limit)
        self._complaints: Counter[tuple[int | None, str]] = Counter()
        pipeline.wake = server.wake

    def run(self, stop: threading.Event) -> None:
        """Serve actors until `stop` is set.

        Raises:
          NoActorsError: nobody has acted for `actors.wait_seconds`.
        """
        stopwatch = self._pipeline.stopwatch("receiver")
        while not stop.is_set():
            for actor_id in self._attendance.take_departed():
                self._depart(actor_id)
            with stopwatch("waiting"):
                events = self._server.poll(POLL_SECONDS)
            with stopwatch("receiving"):
                self._attendance.tick()
                for event in events:
                    self._handle(event)
                self._grant(stop)
                self._look_around()

    def _grant(self, stop: threading.Event) -> None:
        balance, attendance = self._pipeline.balance, self._attendance
        for actor_id, credit in balance.grants(self._pipeline.version):
            if self._server.grant(actor_id, credit):
                attendance.granted(actor_id, credit.version)
            elif stop.is_set():
                return  # actors end at the same moment, and nothing is lost by that
            else:
                balance.lose(actor_id)
                self._depart(actor_id)

    def _look_around(self) -> None:
        pipeline, attendance = self._pipeline, self._attendance
        for actor_id in attendance.overdue(pipeline.published):
            if self._order is None:
                pipeline.balance.revoke(actor_id)
        for actor_id in attendance.unheard():
            if not self._server.reaches(actor_id):
                self._depart(actor_id)
        attendance.listen(self._server.heard, waiting=pipeline.published < pipeline.version)

    def _depart(self, actor_id: int) -> None:
        """An actor cannot be reached. If it is only its connection that is gone, it may still use what it holds."""
        logger.info("actor %d is gone", actor_id)
        self._attendance.left(actor_id)
        if self._order is None:
            self._pipeline.balance.revoke(actor_id)

    def _handle(self, event: Event) -> None:
        balance, attendance = self._pipeline.balance, self._attendance
        match event:
            case Joined(actor_id):
                attendance.trajectories_lost += balance.leave(actor_id)
                attendance.joined(actor_id)
            case Requested(actor_id):
                balance.request(actor_id)
                attendance.requested(actor_id)
            case Lost(actor_id, trajectories):
                balance.lose(actor_id, trajectories)
                attendance.lost(actor_id, trajectories)
                attendance.trajectories_lost += trajectories
            case MessageRejected(actor_id, reason, detail, spent):
                if spent and actor_id is not None:
                    balance.lose(actor_id)
                    attendance.lost(actor_id)
                self._reject(actor_id, reason, detail)
            case Arrived():
                self._arrive(event)

    def _arrive(self, event: Arrived) -> None:
        pipeline, stamp = self._pipeline, event.stamp
        verdict = pipeline.staleness.judge(stamp.policy_version, pipeline.version)
        if verdict is Verdict.FUTURE:
            self._server.refetch(event.actor_id)
            pipeline.balance.lose(event.actor_id)
            self._attendance.lost(event.actor_id)
            detail = f"policy version {stamp.policy_version} is ahead of the learner's {pipeline.version}"
            self._reject(event.actor_id, "future", detail)
            return
        pipeline.meter.spent("actor", event.seconds)
        if pipeline.timeline.recording:
            self._show(event)
        self._attendance.arrived(event.actor_id)
        steps = int(np.count_nonzero(event.trajectory.valid))
        arrival = Arrival(stamp, event.trajectory, event.episodes, steps)
        if not pipeline.balance.arrive(event.actor_id, stamp.policy_version):
            pipeline.turn_away(arrival)
            return
        pipeline.ledger.queue()
        if verdict is Verdict.TOO_OLD:
            pipeline.drop(arrival)
            return
        for released in [arrival] if self._order is None else self._order.add(arrival):
            self.ready.put_nowait(released)

    def _show(self, event: Arrived) -> None:
        """Put an unroll on the timeline: the actor told when it was sent, and what it had done until then."""
        timeline, stamp, track = self._pipeline.timeline, event.stamp, f"actor {event.actor_id}"
        began = event.sent - sum(event.seconds.values())
        for wait in ("credit", "parameters"):
            seconds = event.seconds.pop(wait, 0.0)
            timeline.span(track, f"waiting for {wait}", began, seconds)
            began += seconds
        details = {"version": stamp.policy_version, "sequence": stamp.sequence, **event.seconds}
        timeline.span(track, "unroll", began, event.sent - began, **details)
        timeline.arrow(track, stamp, event.sent - 1e-6, "s")

    def _reject(self, actor_id: int | None, reason: str, detail: str) -> None:
        self._pipeline.ledger.reject(reason)
        self._complaints[actor_id, reason] += 1
        if self._complaints[actor_id, reason] == 1:
            who = "an unknown peer" if actor_id is None else f"actor {actor_id}"
            logger.warning("rejected a message of %s (%s): %s", who, reason, detail)


class Batcher:
    """Gathers `N` trajectories, drops those that would be too old by the time of their update, fills the queue."""

    def __init__(
        self, ready: "queue.Queue[Arrival]", devices: DeviceQueue, pipeline: Pipeline, trajectories: int
    ) -> None:
        self._ready = ready
        self._devices = devices
        self._pipeline = pipeline
        self._trajectories = trajectories
        self._stopwatch = pipeline.stopwatch("batcher")

    def run(self, stop: threading.Event) -> None:
        """Batch until `stop` is set."""
        gathered: list[Arrival] = []
        while not stop.is_set():
            try:
                with self._stopwatch("waiting"):
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
