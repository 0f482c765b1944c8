"""Who is at the other end, and who has sent so much rubbish that it is not listened to any more."""

import re
import secrets
from collections import OrderedDict
from typing import NamedTuple, TypeVar

K = TypeVar("K")
V = TypeVar("V")

ID_LIMIT = 10**9
"""Actor ids are below this: so many that actors of other hosts can draw one and not meet."""

ACTOR_LIMIT = 65_536
"""Actors at a time. A table with an entry per actor has as many: some ten megabytes, whatever peers claim."""

REJECTION_LIMIT = 100
"""Rejected messages after which a peer is cut off. More than any mishap makes (a learner that restarts rejects a few of
each actor); so few that they cost the learner some milliseconds."""


class Peer(NamedTuple):
    """One connection to a server, as long as it lasts and when it is restored.

    Attributes:
      door: number of the listening socket, see `Router`.
      identity: that the peer goes by there. Clients choose a secret one, so that nobody takes over their connection.
    """

    door: int
    identity: bytes

    @property
    def actor_id(self) -> int | None:
        """The id that an actor claims to have; None when the identity is not one of `actor_identity`."""
        match = re.fullmatch(rb"(\d{1,9})-[0-9a-f]{16}", self.identity)
        return int(match[1]) if match else None


def actor_identity(actor_id: int) -> bytes:
    """For a new connection of an actor."""
    return b"%d-%s" % (actor_id, secrets.token_hex(8).encode())


class Table(OrderedDict[K, V]):
    """A dict that is full at `limit` entries and then forgets the one that was set longest ago."""

    def __init__(self, limit: int = ACTOR_LIMIT) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)


class Offenders:
    """Counts the rejected messages of each peer. A trajectory that is taken makes up for one message rejected."""

    def __init__(self) -> None:
        self._rejections: Table[Peer, int] = Table()

    def cut_off(self, peer: Peer) -> bool:
        """Whether nothing of this peer is to be read any more; one that goes on sending is not forgotten."""
        rejections = self._rejections.get(peer, 0)
        if rejections < REJECTION_LIMIT:
            return False
        self._rejections[peer] = rejections
        return True

    def reject(self, peer: Peer) -> bool:
        """Count a rejected message; whether it was the one too many."""
        self._rejections[peer] = self._rejections.get(peer, 0) + 1
        return self._rejections[peer] == REJECTION_LIMIT

    def forgive(self, peer: Peer) -> None:
        """Count a trajectory that was taken."""
        if peer in self._rejections:
            self._rejections[peer] -= 1
            if not self._rejections[peer]:
                del self._rejections[peer]
