"""Times the stages of the work of one thread."""

import time
from types import TracebackType
from typing import Any, Literal, Self

from tianji_jax.metrics import Meter
from tianji_jax.timeline import Timeline
from tianji_jax.types import Stamp


class Stopwatch:
    """`with stopwatch("waiting"): ...` adds to the meter how long a stage took and to the timeline when it was.

    Stages do not nest, so that their shares add up to one.

    Attributes:
      timeline: where the stages are shown while it records.
    """

    def __init__(self, thread: str, meter: Meter, timeline: Timeline) -> None:
        """
        Args:
          thread: whose stages these are.
          meter: counts their seconds.
          timeline: shows them.
        """
        self.thread = thread
        self.timeline = timeline
        self._seconds = meter.stages(thread)

    def __call__(self, stage: str, **details: Any) -> "_Stage":
        """Time one stage; `details` are for the timeline."""
        return _Stage(self, stage, details)

    def arrow(self, stamp: Stamp, part: Literal["s", "t", "f"]) -> None:
        """The arrow of a trajectory touches the stage that goes on now; see `Timeline.arrow`."""
        if self.timeline.recording:
            self.timeline.arrow(self.thread, stamp, time.time(), part)

    def add(self, stage: str, seconds: float, details: dict[str, Any]) -> None:
        """A stage that ends now took `seconds`."""
        self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds
        if self.timeline.recording:
            self.timeline.span(self.thread, stage, time.time() - seconds, seconds, **details)


class _Stage:
    __slots__ = ("_began", "_details", "_stage", "_stopwatch")

    def __init__(self, stopwatch: Stopwatch, stage: str, details: dict[str, Any]) -> None:
        self._stopwatch, self._stage, self._details = stopwatch, stage, details

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopwatch.add(self._stage, time.perf_counter() - self._began, self._details)
