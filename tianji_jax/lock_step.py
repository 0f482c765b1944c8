"""Lock-step mode: the order in which trajectories are consumed, and the exact version that acts in each."""

from collections import Counter

from tianji_jax.balance import Balance
from tianji_jax.transport import Credit


class LockStepBalance(Balance):
    """The same law for consumption in (sequence, actor) order.

    Trajectory `sequence` of `actor_id` is number `i = sequence * actors + actor_id` overall and goes into update
    `i // N`; its credit names the exact version to act with, `max(0, i // N - max_lag)`, whatever is newer by then.
    """

    def __init__(self, max_lag: int, trajectories_per_update: int, actors: int) -> None:
        super().__init__(max_lag, trajectories_per_update)
        self.actors = actors
        self._granted: Counter[int] = Counter()

    def _credit(self, actor_id: int, version: int) -> Credit | None:
        update = (self._granted[actor_id] * self.actors + actor_id) // self.trajectories_per_update
        if update > version + self.max_lag:
            return None
        self._granted[actor_id] += 1
        return Credit(max(0, update - self.max_lag))

    def lose(self, actor_id: int, trajectories: int = 1) -> None:
        """Every trajectory has its place in the order, and one has been lost.

        Raises:
          RuntimeError: always.
        """
        raise RuntimeError(
            f"actor {actor_id} lost {trajectories} trajectories, and lock-step cannot go on without them"
        )

    def leave(self, actor_id: int) -> None:
        """An actor may join, but not begin anew.

        Raises:
          RuntimeError: it has been given credits before.
        """
        if self._granted[actor_id]:
            raise RuntimeError(f"actor {actor_id} began anew, and lock-step cannot go on without what it had to send")
