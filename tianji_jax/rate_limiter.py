"""Samples per insert: who of learner and actors has to wait for the other.

The definition is that of Reverb's `SampleToInsertRatio` (Cassirer et al. 2021, "Reverb: A Framework for Experience
Replay", section 3.4). With

    difference = samples_per_insert * steps inserted - steps sampled

sampling is allowed from `min_size` inserted steps on, as long as the difference stays at or above
`samples_per_insert * min_size - tolerance`, and inserting as long as it stays at or below
`samples_per_insert * min_size + tolerance`; up to `min_size` inserting is free.
"""

import numpy as np

from tianji_jax.replay_config import ReplayConfig


class RateLimiter:
    """Counts steps inserted and sampled. For one thread, the learner's."""

    def __init__(self, samples_per_insert: float, min_size: int, tolerance: float) -> None:
        """
        Args:
          samples_per_insert: how often a step is to be sampled on average.
          min_size: steps inserted before the first may be sampled.
          tolerance: Reverb's `error_buffer`, in samples.
        """
        self._ratio = samples_per_insert
        self._min_size = min_size
        middle = samples_per_insert * min_size
        self._least, self._most = middle - tolerance, middle + tolerance
        self.inserted = 0
        self.sampled = 0

    @classmethod
    def of(cls, config: ReplayConfig, steps_per_insert: int, samples_per_update: int) -> "RateLimiter":
        """The one a configuration asks for.

        Args:
          config: of the replay.
          steps_per_insert: at most so many are inserted at once.
          samples_per_update: so many are drawn at once.
        """
        tolerance = config.tolerance
        if tolerance is None:
            tolerance = config.samples_per_insert * steps_per_insert + samples_per_update
        return cls(config.samples_per_insert, config.min_size, tolerance)

    @property
    def samples_per_insert(self) -> float:
        """Samples so far for each inserted step after the first `min_size`; 0 before there are any."""
        counted = self.inserted - self._min_size
        return self.sampled / counted if counted > 0 else 0.0

    @property
    def counts(self) -> np.ndarray:
        """Steps inserted and sampled so far, int64 `[2]`; set them to go on from there."""
        return np.array([self.inserted, self.sampled], np.int64)

    @counts.setter
    def counts(self, counts: np.ndarray) -> None:
        self.inserted, self.sampled = map(int, counts)

    def can_insert(self, steps: int) -> bool:
        """Whether so many more steps may be inserted now."""
        inserted = self.inserted + steps
        return inserted <= self._min_size or self._ratio * inserted - self.sampled <= self._most

    def can_sample(self, steps: int) -> bool:
        """Whether so many more steps may be sampled now."""
        if self.inserted < self._min_size:
            return False
        return self._ratio * self.inserted - self.sampled - steps >= self._least

    def insert(self, steps: int) -> None:
        """Steps were inserted."""
        self.inserted += steps

    def sample(self, steps: int) -> None:
        """Steps were sampled."""
        self.sampled += steps
