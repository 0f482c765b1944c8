"""What a run measures while it goes."""

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from tianji_jax.types import Episode

Report = dict[str, Any]
"""One report: JSON values by name. A value that is not known is absent."""

RETURN_WINDOW = 100
"""Episodes that `episode_return` averages over, as the field reports it."""

RATE_SECONDS = 10.0
"""Rates are those of so many last seconds: long enough to hold an update of a large batch."""


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
        # Time and counts of the reports within `RATE_SECONDS`, and of one before.
        self._past = deque([(time.monotonic(), dict(self._counts))])
        self._lags: list[int] = []
        self._updates: list[Mapping[str, float]] = []
        self._actor_seconds: dict[str, float] = {}

    @property
    def environment_steps(self) -> int:
        """Environment steps so far."""
        return self._counts["environment_steps"]

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
            self._counts["learner_steps"] += 1
            self._counts["updates_skipped"] += skipped
            self._updates.append(metrics)

    def acted(self, seconds: Mapping[str, float]) -> None:
        """Where an actor's time went during one unroll, in seconds by activity."""
        with self._lock:
            for activity, value in seconds.items():
                self._actor_seconds[activity] = self._actor_seconds.get(activity, 0.0) + value

    def report(self) -> Report:
        """Totals, rates, and the lags and metrics since the last report."""
        now = time.monotonic()
        with self._lock:
            rates = self._rates(now)
            report: Report = {
                "wall_seconds": now - self._began,
                **self._counts,
                "frames": self._counts["environment_steps"] * self._frame_skip,
                "environment_steps_per_second": rates["environment_steps"],
                "frames_per_second": rates["environment_steps"] * self._frame_skip,
                "learner_steps_per_second": rates["learner_steps"],
            }
            if self._returns:
                report["episode_return"] = sum(self._returns) / len(self._returns)
                report["episode_length"] = sum(self._lengths) / len(self._lengths)
            if self._lags:
                report["policy_lag_min"] = min(self._lags)
                report["policy_lag_mean"] = sum(self._lags) / len(self._lags)
                report["policy_lag_max"] = max(self._lags)
            report |= {f"learner/{name}": value for name, value in _means(self._updates).items()}
            total = sum(self._actor_seconds.values())
            if total > 0:
                report |= {f"actor_time/{name}": value / total for name, value in self._actor_seconds.items()}
            self._lags, self._updates, self._actor_seconds = [], [], {}
        return report

    def _rates(self, now: float) -> dict[str, float]:
        while len(self._past) > 1 and self._past[1][0] <= now - RATE_SECONDS:
            self._past.popleft()
        then, counts = self._past[0]
        self._past.append((now, dict(self._counts)))
        elapsed = max(now - then, 1e-9)
        return {name: (self._counts[name] - counts[name]) / elapsed for name in counts}


def _means(updates: list[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each metric over updates; values that are not finite are left out (JSON has none)."""
    sums: dict[str, list[float]] = {}
    for update in updates:
        for name, value in update.items():
            if math.isfinite(value):
                sums.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in sums.items()}
