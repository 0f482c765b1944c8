"""Who acts, who has stopped acting and since when, as far as the learner can tell."""

import logging
import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tianji_jax.config import ActorsConfig

logger = logging.getLogger(__name__)

FIRST_SECONDS = 60.0
"""What an actor may take for its first trajectory, for which it compiles."""

UNROLLS = 4.0
"""An actor hangs when it takes so many times as long as it ever took; steps of environments vary by less."""

SILENCE_SECONDS = 10.0
"""Silence after which the learner says so, and looks whether an actor is still connected."""

TICK_SECONDS = 1.0
"""The clock never advances by more at once: time in which the learner itself was stopped is nobody's silence."""


class NoActorsError(RuntimeError):
    """Nobody has acted for `actors.wait_seconds`."""


@dataclass
class _Actor:
    """What is known of an actor.

    Attributes:
      since: when it began what it does now: its last trajectory came, or it got a credit while it had none.
      heard: when it last said something, or was looked for.
      holding: credits that it has neither spent nor lost.
      version: of the latest of them.
      longest: seconds of its longest unroll; None before the first.
      unrolls: that it has sent.
      hung: it takes too long.
    """

    since: float
    heard: float
    holding: int = 0
    version: int = 0
    longest: float | None = None
    unrolls: int = 0
    hung: bool = False


class Attendance:
    """Watches the actors by a clock of its own.

    For the receiver's thread; `departed`, `restarted` and the counts are for any.

    Attributes:
      restarts: actors that were started again.
      hung: actors that hang now.
      trajectories_lost: for which credits were given, and which are known never to come: an actor was killed or began
        anew before it sent them, or they were lost with a connection.
    """

    def __init__(self, config: ActorsConfig, lock_step: bool = False) -> None:
        """
        Args:
          config: how long to wait for whom.
          lock_step: nothing is taken back from an actor that hangs; it is only reported.
        """
        self.restarts = self.hung = self.trajectories_lost = 0
        self._config = config
        self._lock_step = lock_step
        self._actors: dict[int, _Actor] = {}
        # Bounded by the restarts of local actors, which are.
        self._departed: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._now = 0.0
        self._ticked = time.monotonic()
        self._messages = 0
        self._heard = 0.0
        self._said = False

    @property
    def connected(self) -> int:
        """Actors that have joined and not gone, hung ones included."""
        return len(self._actors)

    def departed(self, actor_id: int) -> None:
        """A local actor's process is no more; from any thread."""
        self._departed.put(actor_id)

    def restarted(self) -> None:
        """A local actor's process was started again; from the thread that does."""
        self.restarts += 1

    def take_departed(self) -> Iterator[int]:
        """Actors whose processes have ended since the last call."""
        while not self._departed.empty():
            yield self._departed.get()

    def tick(self, seconds: float | None = None) -> None:
        """Let the clock go on by the time since the last call, or by `seconds`."""
        now = time.monotonic()
        self._now += min(TICK_SECONDS, now - self._ticked) if seconds is None else seconds
        self._ticked = now

    def joined(self, actor_id: int) -> None:
        """An actor said hello: a new one, or one that begins anew."""
        self.left(actor_id)
        self._actor(actor_id)

    def left(self, actor_id: int) -> None:
        """An actor is gone; whatever it says makes it known again."""
        actor = self._actors.pop(actor_id, None)
        if actor is not None and actor.hung:
            self.hung -= 1

    def requested(self, actor_id: int) -> None:
        """An actor asked for a credit."""
        self._actor(actor_id).heard = self._now

    def granted(self, actor_id: int, version: int) -> None:
        """An actor got a credit to act with `version` or a later one."""
        actor = self._actor(actor_id)
        if not actor.holding:
            actor.since = self._now
        actor.holding += 1
        actor.version = version

    def arrived(self, actor_id: int) -> None:
        """A trajectory came."""
        actor = self._actor(actor_id)
        # One unroll that hung is no measure of those to come.
        took = min(self._now - actor.since, self._patience(actor))
        # The first took longer than others, because it compiled; it counts until there is another.
        actor.longest = took if actor.longest is None or actor.unrolls == 1 else max(actor.longest, took)
        actor.unrolls += 1
        self.lost(actor_id)

    def lost(self, actor_id: int, trajectories: int = 1) -> None:
        """Credits came back without a trajectory that can be used; the actor goes on with the next."""
        actor = self._actor(actor_id)
        if actor.hung:
            actor.hung = False
            self.hung -= 1
            logger.info("actor %d is back after %.1f s", actor_id, self._now - actor.since)
        actor.holding = max(0, actor.holding - trajectories)
        actor.since = actor.heard = self._now

    def overdue(self, published: int) -> list[int]:
        """Actors that hang since the last call; each is reported once.

        Args:
          published: newest version of the parameters that actors can have.
        """
        found = []
        for actor_id, actor in self._actors.items():
            if not actor.holding or actor.hung:
                continue
            if actor.version > published:  # it waits for the learner
                actor.since = self._now
            elif self._now - actor.since > self._patience(actor):
                actor.hung = True
                self.hung += 1
                self._report(actor_id, actor)
                found.append(actor_id)
        return found

    def unheard(self) -> list[int]:
        """Actors that have said nothing for `SILENCE_SECONDS`, each once in so many."""
        found = [i for i, actor in self._actors.items() if self._now - actor.heard >= SILENCE_SECONDS]
        for actor_id in found:
            self._actors[actor_id].heard = self._now
        return found

    def listen(self, messages: int, waiting: bool) -> None:
        """Notice when nobody says anything any more.

        Args:
          messages: that have come from actors so far.
          waiting: actors wait for parameters that the learner has yet to publish; that is no silence of theirs.

        Raises:
          NoActorsError: nobody has for `actors.wait_seconds`.
        """
        silence, limit = self._now - self._heard, self._config.wait_seconds
        if messages != self._messages or waiting:
            if self._said and messages != self._messages:
                logger.warning("actors are heard of again after %.0f s", silence)
                self._said = False
            self._messages, self._heard = messages, self._now
        elif silence >= limit:
            raise NoActorsError(
                f"no actor has been heard of for {silence:.0f} s, and actors.wait_seconds is {limit:g}: allow more "
                f"where an unroll takes longer, or see why none acts{self._where()}"
            )
        elif silence >= SILENCE_SECONDS and not self._said:
            self._said = True
            logger.warning(
                "no actor has been heard of for %.0f s%s; the run ends after %g s of silence (actors.wait_seconds)",
                silence,
                self._where(),
                limit,
            )

    def _where(self) -> str:
        return "" if self._config.listen is None else f"; others may connect to {self._config.listen}"

    def _patience(self, actor: _Actor) -> float:
        """Seconds that an actor may take for one trajectory."""
        usual = FIRST_SECONDS if actor.longest is None else UNROLLS * actor.longest
        return max(self._config.hang_seconds, usual)

    def _actor(self, actor_id: int) -> _Actor:
        if actor_id not in self._actors:
            self._actors[actor_id] = _Actor(self._now, self._now)
        return self._actors[actor_id]

    def _report(self, actor_id: int, actor: _Actor) -> None:
        logger.warning(
            "actor %d hangs: no trajectory for %.1f s%s; %s",
            actor_id,
            self._now - actor.since,
            "" if actor.longest is None else f", where the longest took {actor.longest:.2g} s",
            "lock-step waits for it" if self._lock_step else "what it was granted goes to the others",
        )
