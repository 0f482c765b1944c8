"""The balance of production and consumption: credits, and when a starving learner may reuse a batch.

One law (the TianJi paper, arXiv 2502.20190, balances sample production against consumption to bound staleness; this is
its form here):

    trajectories granted but not yet consumed <= (max_lag + 1) * trajectories per update

An actor sends one trajectory for each credit. With first-in first-out consumption a trajectory granted at version `v`
is behind at most `(max_lag + 1) * N - 1` others, so its update happens at version `v + max_lag` at the latest.

What an actor that hangs was granted is taken back, and others get it. Should its trajectories come after all, they are
taken where there is room within the law.
"""

import threading
from collections import Counter, deque
from dataclasses import dataclass

from tianji_jax.transport import Credit


@dataclass
class _Grant:
    """A credit that is out: who holds it, and the least version its trajectory will be stamped with."""

    actor_id: int
    version: int


class Balance:
    """Hands out credits in the order they were asked for. Safe to use from any thread."""

    def __init__(self, max_lag: int, trajectories_per_update: int) -> None:
        self.max_lag = max_lag
        self.trajectories_per_update = trajectories_per_update
        self.limit = (max_lag + 1) * trajectories_per_update
        self._lock = threading.Lock()
        self._asking: deque[int] = deque()
        # Both in the order of granting; arrived ones wait in the learner's queues.
        self._held: list[_Grant] = []
        self._arrived: deque[int] = deque()
        # Credits taken back from actors that may still use them. They are older than those in `_held`.
        self._revoked: Counter[int] = Counter()

    @property
    def outstanding(self) -> int:
        """Trajectories granted but not yet consumed."""
        with self._lock:
            return len(self._held) + len(self._arrived)

    def request(self, actor_id: int) -> None:
        """An actor asks for a credit."""
        with self._lock:
            self._asking.append(actor_id)

    def grants(self, version: int) -> list[tuple[int, Credit]]:
        """The credits that can go out now, with the learner at `version`."""
        granted = []
        with self._lock:
            for _ in range(len(self._asking)):
                actor_id = self._asking.popleft()
                # One that hangs gets nothing more before it has spent or lost what it had.
                credit = None if self._revoked[actor_id] else self._credit(actor_id, version)
                if credit is None:
                    self._asking.append(actor_id)
                else:
                    self._held.append(_Grant(actor_id, credit.version))
                    granted.append((actor_id, credit))
        return granted

    def arrive(self, actor_id: int, policy_version: int) -> bool:
        """A trajectory came for a credit; False when that had been taken back and there is no room for it now."""
        with self._lock:
            if not self._take_back(actor_id) and len(self._held) + len(self._arrived) >= self.limit:
                return False
            self._arrived.append(policy_version)
        return True

    def lose(self, actor_id: int, trajectories: int = 1) -> None:
        """Trajectories that an actor had credits for will not come."""
        with self._lock:
            for _ in range(trajectories):
                self._take_back(actor_id)

    def revoke(self, actor_id: int) -> None:
        """An actor hangs, or cannot be reached: what it holds goes to the others."""
        with self._lock:
            kept = [grant for grant in self._held if grant.actor_id != actor_id]
            self._revoked[actor_id] += len(self._held) - len(kept)
            self._held = kept

    def release(self, trajectories: int = 1) -> None:
        """Arrived trajectories, oldest first, left the queues: consumed, dropped or rejected."""
        with self._lock:
            for _ in range(trajectories):
                self._arrived.popleft()

    def leave(self, actor_id: int) -> int:
        """An actor begins anew: what it held and asked for goes back to the others.

        Returns:
          How many trajectories that it had credits for, taken back or not, will never come.
        """
        with self._lock:
            lost = self._revoked[actor_id] + sum(grant.actor_id == actor_id for grant in self._held)
            self._held = [grant for grant in self._held if grant.actor_id != actor_id]
            self._asking = deque(asking for asking in self._asking if asking != actor_id)
            del self._revoked[actor_id]
        return lost

    def can_reuse(self, version: int) -> bool:
        """Whether one more update at `version`, on no new data, leaves everything in flight within `max_lag`."""
        with self._lock:
            stamps = [*self._arrived, *(grant.version for grant in self._held)]
        return all(
            version + 1 + place // self.trajectories_per_update - stamp <= self.max_lag
            for place, stamp in enumerate(stamps)
        )

    def _credit(self, actor_id: int, version: int) -> Credit | None:
        if len(self._held) + len(self._arrived) >= self.limit:
            return None
        return Credit(version)

    def _take_back(self, actor_id: int) -> bool:
        """Settle an actor's oldest credit; whether that still counted."""
        if self._revoked[actor_id]:
            self._revoked[actor_id] -= 1
            return False
        index = next(index for index, grant in enumerate(self._held) if grant.actor_id == actor_id)
        del self._held[index]
        return True
