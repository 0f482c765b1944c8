"""How old a trajectory may be, and the account of what became of each."""

import dataclasses
import threading
from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """What the filter says of a trajectory."""

    FRESH = "fresh"
    STALE = "stale"
    TOO_OLD = "too old"
    FUTURE = "future"


@dataclass(frozen=True)
class StalenessFilter:
    """Compares the version that acted with the version that learns.

    Attributes:
      fresh_lag: up to this lag (in policy versions) a trajectory passes as on-policy.
      max_lag: up to this lag it passes and the loss corrects for it; beyond, it is dropped.
    """

    fresh_lag: int
    max_lag: int

    def __post_init__(self) -> None:
        if not 0 <= self.fresh_lag <= self.max_lag:
            raise ValueError(f"need 0 <= fresh_lag <= max_lag, got {self.fresh_lag} and {self.max_lag}")

    def judge(self, policy_version: int, learner_version: int) -> Verdict:
        """Judge a trajectory of `policy_version` that would be learned from at `learner_version`."""
        lag = learner_version - policy_version
        if lag < 0:
            return Verdict.FUTURE
        if lag > self.max_lag:
            return Verdict.TOO_OLD
        return Verdict.FRESH if lag <= self.fresh_lag else Verdict.STALE


@dataclass(frozen=True)
class Counts:
    """Trajectories since the run began; `received == consumed + dropped + rejected + queued`."""

    received: int = 0
    consumed: int = 0
    dropped: int = 0
    rejected: int = 0
    queued: int = 0


class Ledger:
    """Where every trajectory went. Safe to use from any thread; `counts` is one consistent picture.

    `queued` is kept by its own additions and subtractions, not derived from the others, so that the law above can fail
    and a test can catch a trajectory that was lost or counted twice.
    """

    def __init__(self, before: Counts = Counts()) -> None:
        """
        Args:
          before: of the run until it was saved; what was queued then is gone and was never received.
        """
        self._lock = threading.Lock()
        settled = before.consumed + before.dropped + before.rejected
        self._counts = {**dataclasses.asdict(before), "received": settled, "queued": 0}
        self._rejections: dict[str, int] = {}

    def queue(self) -> None:
        """A trajectory arrived and waits to be consumed."""
        self._move(received=1, queued=1)

    def reject(self, reason: str) -> None:
        """A message arrived that is no acceptable trajectory."""
        self._move(received=1, rejected=1)
        with self._lock:
            self._rejections[reason] = self._rejections.get(reason, 0) + 1

    def drop(self, trajectories: int = 1) -> None:
        """Queued trajectories grew too old."""
        self._move(queued=-trajectories, dropped=trajectories)

    def consume(self, trajectories: int) -> None:
        """Queued trajectories went into an update."""
        self._move(queued=-trajectories, consumed=trajectories)

    @property
    def counts(self) -> Counts:
        """All counts at one moment."""
        with self._lock:
            return Counts(**self._counts)

    @property
    def rejections(self) -> dict[str, int]:
        """Rejected messages by reason."""
        with self._lock:
            return dict(self._rejections)

    def _move(self, **changes: int) -> None:
        with self._lock:
            for name, change in changes.items():
                self._counts[name] += change
