"""What a run measures while it goes."""

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tianji_jax.types import Episode

Report = dict[str, Any]
"""One report: JSON values by name. A value that is not known is absent."""

RETURN_WINDOW = 100
"""Episodes that `episode_return` averages over, as the field reports it."""

RATE_SECONDS = 10.0
"""Rates and shares of time are those of so many last seconds: long enough to hold an update of a large batch."""

LONGER_RATES = (60, 300)
"""Seconds that the rates of environment steps are told for as well, to tell a slow run from a slow moment."""

PAST_SECONDS = 0.5
"""Between two counts that are kept to take rates from; 300 s of them are 600."""


class Meter:
    """Counts and averages of a run. Safe to use from any thread.

    Steps are environment steps, counted when their trajectory leaves the queues (learned from or dropped); a reused
    batch counts once. Counters are Python integers and do not overflow.
    """

    def __init__(self, frame_skip: int = 1, saved: Mapping[str, Any] | None = None) -> None:
        """
        Args:
          frame_skip: frames per environment step.
          saved: what `state` of an earlier meter gave, to go on from there.
        """
        saved = saved or {}
        self._lock = threading.Lock()
        self._frame_skip = frame_skip
        self._began = time.monotonic() - saved.get("wall_seconds", 0.0)
        self._returns: deque[float] = deque(saved.get("returns", ()), maxlen=RETURN_WINDOW)
        self._lengths: deque[int] = deque(saved.get("lengths", ()), maxlen=RETURN_WINDOW)
        self._counts = dict.fromkeys(
            (
                "environment_steps",
                "learner_steps",
                "episodes",
                "samples_corrected",
                "samples_reused",
                "updates_skipped",
            ),
            0,
        )
        self._counts |= saved.get("counts", {})
        self._lags: list[int] = []
        self._updates: list[Mapping[str, float]] = []
        # Seconds by thread and stage since the start.
        self._spent: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self._past = deque([self._moment(time.monotonic())])
        self._warm = False
        self._elsewhere = 0

    @property
    def environment_steps(self) -> int:
        """Environment steps so far."""
        return self._counts["environment_steps"]

    @property
    def own_steps(self) -> int:
        """Environment steps so far, without those that other learners told of."""
        with self._lock:
            return self._counts["environment_steps"] - self._elsewhere

    @property
    def window_return(self) -> float | None:
        """Mean return of a full window of episodes; None before there are so many."""
        with self._lock:
            return sum(self._returns) / RETURN_WINDOW if len(self._returns) == RETURN_WINDOW else None

    def reached(self, episode_return: float) -> bool:
        """Whether the mean return of a full window of episodes is at least `episode_return`."""
        mean = self.window_return
        return mean is not None and mean >= episode_return

    def state(self) -> dict[str, Any]:
        """All that a later meter needs to go on counting, as JSON values."""
        with self._lock:
            return {
                "wall_seconds": time.monotonic() - self._began,
                "counts": dict(self._counts),
                "returns": list(self._returns),
                "lengths": list(self._lengths),
            }

    def experience(self, steps: int, episodes: Iterable[Episode]) -> None:
        """Environment steps that left the queues, and the episodes that ended in them."""
        with self._lock:
            self._counts["environment_steps"] += steps
            for episode in episodes:
                self._counts["episodes"] += 1
                self._returns.append(episode.episode_return)
                self._lengths.append(episode.length)

    def elsewhere(self, steps: int) -> None:
        """Environment steps that other learners of the run consumed."""
        with self._lock:
            self._counts["environment_steps"] += steps
            self._elsewhere += steps

    def consumed(self, lags: Iterable[int], corrected: int) -> None:
        """A batch went into an update: the lag of each trajectory, and the steps the loss corrects for."""
        with self._lock:
            self._lags.extend(lags)
            self._counts["samples_corrected"] += corrected

    def reused(self, steps: int, lags: Iterable[int], corrected: int) -> None:
        """A batch went into one more update."""
        self.consumed(lags, corrected)
        with self._lock:
            self._counts["samples_reused"] += steps

    def updated(self, metrics: Mapping[str, float], skipped: bool) -> None:
        """An update finished with these metrics; skipped, if they were not finite."""
        with self._lock:
            if not self._warm:
                self._forget_start()
            self._counts["learner_steps"] += 1
            self._counts["updates_skipped"] += skipped
            self._updates.append(metrics)

    def stages(self, thread: str) -> dict[str, float]:
        """Where the time of a thread goes, in seconds by stage, for that thread to add to; from the first update on the
        reports tell each stage's share. No lock guards it: one thread writes, and copying a dictionary is one step of
        the interpreter's.
        """
        with self._lock:
            return self._spent[thread]

    def spent(self, thread: str, seconds: Mapping[str, float]) -> None:
        """Add to `stages` of a thread that is another's to count; all actors are one, called `actor`."""
        with self._lock:
            stages = self._spent[thread]
            for stage, value in seconds.items():
                stages[stage] = stages.get(stage, 0.0) + value

    def report(self) -> Report:
        """Totals, rates, shares of time, and the lags and metrics since the last report."""
        now = time.monotonic()
        with self._lock:
            then = self._before(now, RATE_SECONDS)
            steps_per_second = self._rate("environment_steps", now, then)
            report: Report = {
                "wall_seconds": now - self._began,
                **self._counts,
                "frames": self._counts["environment_steps"] * self._frame_skip,
                "environment_steps_per_second": steps_per_second,
                "frames_per_second": steps_per_second * self._frame_skip,
                "learner_steps_per_second": self._rate("learner_steps", now, then),
            }
            for seconds in LONGER_RATES:
                rate = self._rate("environment_steps", now, self._before(now, seconds))
                report[f"environment_steps_per_second_{seconds}"] = rate
                report[f"frames_per_second_{seconds}"] = rate * self._frame_skip
            if self._returns:
                report["episode_return"] = sum(self._returns) / len(self._returns)
                report["episode_length"] = sum(self._lengths) / len(self._lengths)
            if self._lags:
                report["policy_lag_min"] = min(self._lags)
                report["policy_lag_mean"] = sum(self._lags) / len(self._lags)
                report["policy_lag_max"] = max(self._lags)
            report |= {f"learner/{name}": value for name, value in _means(self._updates).items()}
            report |= self._shares(then)
            self._lags, self._updates = [], []
            self._remember(now)
        return report

    def _forget_start(self) -> None:
        """Until the first update everybody waits for the compiler, which says nothing about the run."""
        self._warm = True
        spent = self._stages()
        self._past = deque(moment._replace(spent=spent) for moment in self._past)

    def _stages(self) -> dict[str, dict[str, float]]:
        return {thread: stages.copy() for thread, stages in self._spent.items()}

    def _moment(self, now: float) -> "_Moment":
        return _Moment(now, dict(self._counts), self._stages())

    def _remember(self, now: float) -> None:
        if now - self._past[-1].time >= PAST_SECONDS:
            self._past.append(self._moment(now))
        while len(self._past) > 1 and self._past[1].time <= now - max(LONGER_RATES):
            self._past.popleft()

    def _before(self, now: float, seconds: float) -> "_Moment":
        """The newest moment that is at least `seconds` ago, or the first there is."""
        return next((moment for moment in reversed(self._past) if moment.time <= now - seconds), self._past[0])

    def _rate(self, count: str, now: float, then: "_Moment") -> float:
        return (self._counts[count] - then.counts[count]) / max(now - then.time, 1e-9)

    def _shares(self, then: "_Moment") -> dict[str, float]:
        """What part of its time each thread spent in each stage since then."""
        shares: dict[str, float] = {}
        for thread, stages in self._stages().items():
            before = then.spent.get(thread, {})
            seconds = {stage: value - before.get(stage, 0.0) for stage, value in stages.items()}
            total = sum(seconds.values())
            if total > 0:
                shares |= {f"{thread}_time/{stage}": value / total for stage, value in seconds.items()}
        return shares


class _Moment(NamedTuple):
    """What had been counted at a time, and the seconds spent by then."""

    time: float
    counts: dict[str, int]
    spent: dict[str, dict[str, float]]


def _means(updates: list[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each metric over updates; values that are not finite are left out (JSON has none)."""
    sums: dict[str, list[float]] = {}
    for update in updates:
        for name, value in update.items():
            if math.isfinite(value):
                sums.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in sums.items()}
