"""What every thread and actor does when, on one timeline, while a profile is taken.

The file is in Chrome's trace format, which https://ui.perfetto.dev opens. Arrows follow each trajectory from its unroll
over the batch it went into to the update that learned from it.
"""

import gzip
import json
import threading
from pathlib import Path
from typing import Any, Literal

from tianji_jax.types import Stamp

EVENTS_LIMIT = 500_000
"""Events kept, some 200 MB of memory; further ones are counted and left out."""


class Timeline:
    """Collects what happens while it is `recording`. Safe to use from any thread; times are Unix time in seconds.

    Attributes:
      recording: whether anything is kept now.
      left_out: events that were too many.
    """

    def __init__(self) -> None:
        self.recording = False
        self.left_out = 0
        self._lock = threading.Lock()
        self._tracks: dict[str, int] = {}
        self._events: list[dict[str, Any]] = []

    def span(self, track: str, name: str, began: float, seconds: float, **details: Any) -> None:
        """Something that went on for `seconds`; `details` are shown when it is clicked on."""
        self._add(track, {"ph": "X", "name": name, "ts": began * 1e6, "dur": seconds * 1e6, "args": details})

    def arrow(self, track: str, stamp: Stamp, at: float, part: Literal["s", "t", "f"]) -> None:
        """The arrow of a trajectory touches the span that lies at the time `at`.

        Args:
          track: of the span.
          stamp: the trajectory's.
          at: within the span.
          part: `s` where the arrow starts, `t` on its way, `f` where it ends.
        """
        event = {"ph": part, "name": "trajectory", "cat": "trajectory", "id": f"{stamp.actor_id}.{stamp.sequence}"}
        self._add(track, {**event, "ts": at * 1e6, "bp": "e"})

    def write(self, path: Path) -> None:
        """Write all events as gzipped JSON."""
        with self._lock:
            events = list(self._events)
            tracks = sorted(self._tracks.items())
        for index, (track, tid) in enumerate(tracks):
            for name, value in (("thread_name", {"name": track}), ("thread_sort_index", {"sort_index": index})):
                events.append({"ph": "M", "name": name, "pid": 1, "tid": tid, "args": value})
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)

    def _add(self, track: str, event: dict[str, Any]) -> None:
        if not self.recording:
            return
        with self._lock:
            if len(self._events) >= EVENTS_LIMIT:
                self.left_out += 1
                return
            tid = self._tracks.setdefault(track, len(self._tracks) + 1)
            self._events.append({**event, "pid": 1, "tid": tid})
