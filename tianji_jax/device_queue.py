"""From trajectories to batches that lie ready on the learner's devices."""

import math
import queue
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tianji_jax.parallel import Parallel
from tianji_jax.stopwatch import Stopwatch
from tianji_jax.types import ArraySpec, Episode, PyTree, Stamp, Trajectory
from tianji_jax.worker import POLL_SECONDS


class Arrival(NamedTuple):
    """A trajectory the filter let in.

    Attributes:
      stamp: where it comes from.
      trajectory: a `Trajectory` of NumPy arrays; None once they are on the devices.
      episodes: those that ended in it.
      steps: its environment steps, those that only reset an environment left out.
    """

    stamp: Stamp
    trajectory: Any
    episodes: list[Episode]
    steps: int


class Shard(NamedTuple):
    """What the update takes: `b` environments of some trajectories and the version that acted in each.

    Attributes:
      trajectory: as `Trajectory`, with `b` environments.
      policy_version: int32 `[b]`.
    """

    trajectory: Trajectory
    policy_version: Any


class ReadyBatch(NamedTuple):
    """A batch on the devices.

    Attributes:
      shards: a `Shard` of global arrays `[D, ...]`.
      arrivals: the trajectories in it, without their arrays.
    """

    shards: PyTree
    arrivals: list[Arrival]


class BatchAssembler:
    """Joins `N` trajectories of `B` environments and cuts them into `D` shards of `b = N * B / D`.

    Every value is copied once, into a fresh buffer (which the device may go on sharing on CPU); a trajectory that is a
    whole shard by itself is not copied at all.
    """

    def __init__(self, trajectory_spec: PyTree, trajectories: int, shards: int) -> None:
        environments = trajectory_spec.reward.shape[1]
        total = trajectories * environments
        if total % shards:
            step = shards // math.gcd(environments, shards)
            fits = -(-trajectories // step) * step
            raise ValueError(
                f"learner.trajectories_per_update x actors.environments = {trajectories} x {environments} = {total} "
                f"environments cannot be divided among {shards} devices: make the product a multiple of {shards}, for "
                f"example learner.trajectories_per_update={fits}"
            )
        self.environments = environments
        self.width = total // shards
        self.shards = shards
        self._axes = Trajectory(**{name: 0 if name == "state" else 1 for name in Trajectory._fields})

    def shard_spec(self, trajectory_spec: PyTree) -> Shard:
        """`ArraySpec` of every array of a shard."""
        trajectory = self._map(
            lambda axis, spec: ArraySpec((*spec.shape[:axis], self.width, *spec.shape[axis + 1 :]), spec.dtype),
            trajectory_spec,
        )
        return Shard(trajectory, ArraySpec((self.width,), np.dtype(np.int32)))

    def assemble(self, arrivals: Sequence[Arrival]) -> list[Shard]:
        """One host-side shard per device, environments in the order of `arrivals`."""
        return [self._shard(arrivals, index * self.width) for index in range(self.shards)]

    def _shard(self, arrivals: Sequence[Arrival], start: int) -> Shard:
        first, last = start // self.environments, (start + self.width - 1) // self.environments
        offset = start - first * self.environments
        trajectories = [arrival.trajectory for arrival in arrivals[first : last + 1]]

        def cut(axis: int, *parts: np.ndarray) -> np.ndarray:
            window = (slice(None),) * axis
            if len(parts) == 1 and self.width == self.environments:
                return parts[0]
            if len(parts) == 1:
                return np.ascontiguousarray(parts[0][(*window, slice(offset, offset + self.width))])
            shape = (*parts[0].shape[:axis], self.width, *parts[0].shape[axis + 1 :])
            joined = np.empty(shape, parts[0].dtype)
            for index, part in enumerate(parts):
                at = index * self.environments - offset
                low, high = max(0, at), min(self.width, at + self.environments)
                joined[(*window, slice(low, high))] = part[(*window, slice(low - at, high - at))]
            return joined

        versions = np.repeat(
            np.array([arrival.stamp.policy_version for arrival in arrivals[first : last + 1]], np.int32),
            self.environments,
        )
        return Shard(self._map(cut, *trajectories), versions[offset : offset + self.width])

    def _map(self, function: PyTree, *trajectories: Trajectory) -> Trajectory:
        return Trajectory(
            *(
                jax.tree.map(lambda *leaves, axis=axis: function(axis, *leaves), *parts)
                for axis, parts in zip(self._axes, zip(*trajectories, strict=True), strict=True)
            )
        )


class DeviceQueue:
    """Batches whose transfer to the devices has begun, first in first out.

    Bounded in batches: each costs `nbytes` of memory over all devices, and waiting in it makes a batch older.
    """

    def __init__(
        self, parallel: Parallel, assembler: BatchAssembler, shard_spec: Shard, capacity: int, stopwatch: Stopwatch
    ) -> None:
        """
        Args:
          parallel: the devices.
          assembler: of the batches.
          shard_spec: what it makes.
          capacity: in batches.
          stopwatch: of the thread that calls `put`.
        """
        self.capacity = capacity
        self.nbytes = parallel.num_devices * sum(spec.nbytes for spec in jax.tree.leaves(shard_spec))
        self._parallel = parallel
        self._assembler = assembler
        self._stopwatch = stopwatch
        self._queue: queue.Queue[ReadyBatch] = queue.Queue(capacity)

    def __len__(self) -> int:
        return self._queue.qsize()

    def put(self, arrivals: Sequence[Arrival], stop: threading.Event) -> bool:
        """Assemble, begin the transfer, and wait for a place; False when `stop` was set first."""
        with self._stopwatch("assembly"):
            shards = self._parallel.shard(self._assembler.assemble(arrivals))
            for arrival in arrivals:
                self._stopwatch.arrow(arrival.stamp, "t")
        batch = ReadyBatch(shards, [arrival._replace(trajectory=None) for arrival in arrivals])
        while not stop.is_set():
            try:
                with self._stopwatch("queue"):
                    self._queue.put(batch, timeout=POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False

    def get(self, timeout: float) -> ReadyBatch | None:
        """The oldest batch, or None when there is none within `timeout` seconds."""
        try:
            return self._queue.get(timeout=timeout)
        except queue.Empty:
            return None
