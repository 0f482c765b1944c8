"""The learners that train together: one process per host, all in one `jax.distributed` world.

A program that has called `jax.distributed.initialize` is one of several learners; any other is alone.
"""

import json
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tianji_jax.types import PyTree


@dataclass(frozen=True)
class World:
    """Which learner of how many this process is.

    Attributes:
      rank: from 0; learner 0 writes metrics and checkpoints.
      size: how many learners there are.
    """

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the learner that writes and shows."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other learner."""
        return self.size == 1

    def share(self, value: Any) -> Any:
        """What learner 0 passes in (JSON values), for every learner. All have to call this, in the same order."""
        if self.alone:
            return value
        data = np.frombuffer(json.dumps(value).encode(), np.uint8) if self.leads else np.zeros(0, np.uint8)
        size = int(self.share_arrays(np.int32(len(data))))
        padded = np.zeros(size, np.uint8)
        padded[: len(data)] = data
        return json.loads(np.asarray(self.share_arrays(padded)).tobytes())

    def share_arrays(self, tree: PyTree) -> PyTree:
        """Learner 0's arrays, as NumPy arrays; the others pass in ones of the same shapes and dtypes."""
        return tree if self.alone else multihost_utils.broadcast_one_to_all(tree, is_source=self.leads)


ALONE = World()


def current_world() -> World:
    """The world of this process."""
    return World(jax.process_index(), jax.process_count())
