"""Lock-step mode: the order in which trajectories are consumed, and the exact version that acts in each."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tianji_jax.balance import Balance
from tianji_jax.device_queue import Arrival
from tianji_jax.transport import Credit


@dataclass(frozen=True)
class Schedule:
    """Which update consumes a trajectory, and which version acts in it, whatever the threads do.

    Trajectory `sequence` of `actor_id` is number `i = sequence * actors + actor_id` overall and goes into update
    `i // trajectories_per_update`, which makes version `i // trajectories_per_update + 1`.

    Environments cannot be saved. So that a run that is resumed at a checkpoint repeats the one that was not, the actors
    of both begin anew there: with fresh environments, fresh keys, and that version.

    Attributes:
      actors: their number.
      trajectories_per_update: N.
      max_lag: an update is that many versions ahead of the policy that acted, where there are as many.
      begin_every: the actors begin anew at each multiple of so many versions; 0: never.
    """

    actors: int
    trajectories_per_update: int
    max_lag: int
    begin_every: int = 0

    def update(self, actor_id: int, sequence: int) -> int:
        """The update that consumes a trajectory, from 0; also the version that it starts from."""
        return (sequence * self.actors + actor_id) // self.trajectories_per_update

    def beginning(self, update: int) -> int:
        """The version at which the actors last began before `update`."""
        return update // self.begin_every * self.begin_every if self.begin_every else 0

    def version(self, update: int) -> int:
        """The version that acts for `update`."""
        return max(self.beginning(update), update - self.max_lag)

    def first_sequence(self, actor_id: int, version: int) -> int:
        """The first trajectory of an actor that is consumed at `version` or later."""
        return max(0, -((actor_id - version * self.trajectories_per_update) // self.actors))


class LockStepBalance(Balance):
    """The law of `Balance` for consumption by a `Schedule`: a credit names the exact version to act with."""

    def __init__(self, schedule: Schedule, version: int = 0) -> None:
        """
        Args:
          schedule: of the run.
          version: the learner's at the start.
        """
        super().__init__(schedule.max_lag, schedule.trajectories_per_update)
        self._schedule = schedule
        # The sequence number of the next trajectory that each actor gets a credit for.
        self._next = Counter({i: schedule.first_sequence(i, version) for i in range(schedule.actors)})
        self._granted: set[int] = set()

    def _credit(self, actor_id: int, version: int) -> Credit | None:
        update = self._schedule.update(actor_id, self._next[actor_id])
        if update > version + self.max_lag or self._schedule.beginning(update) > version:
            return None
        self._next[actor_id] += 1
        self._granted.add(actor_id)
        return Credit(self._schedule.version(update))

    def lose(self, actor_id: int, trajectories: int = 1) -> None:
        """Every trajectory has its place in the order, and one has been lost.

        Raises:
          RuntimeError: always.
        """
        raise RuntimeError(
            f"actor {actor_id} lost {trajectories} trajectories, and lock-step cannot go on without them"
        )

    def leave(self, actor_id: int) -> int:
        """An actor may join, but not begin anew.

        Raises:
          RuntimeError: it has been given credits before.
        """
        if actor_id in self._granted:
            raise RuntimeError(f"actor {actor_id} began anew, and lock-step cannot go on without what it had to send")
        return 0


class Order:
    """Holds trajectories back until their turn in (sequence, actor) order comes."""

    def __init__(self, schedule: Schedule, version: int = 0) -> None:
        """
        Args:
          schedule: of the run.
          version: the learner's at the start.
        """
        self._actors = schedule.actors
        self._next = version * schedule.trajectories_per_update
        self._waiting: dict[int, Arrival] = {}

    def add(self, arrival: Arrival) -> Iterator[Arrival]:
        """Those whose turn has come now."""
        stamp = arrival.stamp
        self._waiting[stamp.sequence * self._actors + stamp.actor_id] = arrival
        while self._next in self._waiting:
            yield self._waiting.pop(self._next)
            self._next += 1
