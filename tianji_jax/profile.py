"""A profile of some updates: what JAX ran on the devices, and what every thread and actor did meanwhile."""

import logging
from pathlib import Path

import jax

from tianji_jax.timeline import Timeline

logger = logging.getLogger(__name__)

FOLDER = "profile"
"""In the run's folder."""

TIMELINE = "timeline.json.gz"

FIRST_UPDATES = 10
"""Not profiled: they fill the queues."""


class Profile:
    """Begins and ends the profile; called by the learner between updates."""

    def __init__(self, folder: Path, updates: int, timeline: Timeline) -> None:
        """
        Args:
          folder: the run's.
          updates: to profile; 0 for none.
          timeline: recorded meanwhile.
        """
        self._folder = folder / FOLDER
        self._timeline = timeline
        self._left = updates
        self._first: int | None = None
        self._last: int | None = None

    def between_updates(self, version: int) -> None:
        """Begin or end when it is time. Errors of the profiler are told; the training goes on."""
        if self._first is None:
            self._first = version + FIRST_UPDATES
        if self._left and self._last is None:
            if version >= self._first:
                self._begin(version)
        elif self._last is not None and version >= self._last:
            self.close()

    def close(self) -> None:
        """End the profile if one is being taken."""
        if self._last is None:
            return
        self._last, self._left = None, 0
        self._timeline.recording = False
        try:
            jax.profiler.stop_trace()
            self._timeline.write(self._folder / TIMELINE)
        except Exception as error:
            logger.warning("profile: not written to %s: %s", self._folder, error)
            return
        if self._timeline.left_out:
            logger.warning("profile: %d events were too many and are missing", self._timeline.left_out)

    def _begin(self, version: int) -> None:
        self._last = version + self._left
        try:
            jax.profiler.start_trace(str(self._folder))
        except Exception as error:
            logger.warning("profile: cannot begin in %s: %s", self._folder, error)
            self._left, self._last = 0, None
            return
        self._timeline.recording = True
