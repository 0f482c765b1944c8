"""Who of several learners is there, who is silent, and why all have to end.

Kept by learner 0, which tells the others what it finds. Nothing here looks at a clock or a socket.
"""

import signal
from dataclasses import dataclass

from tianji_jax.interrupts import INTERRUPTED, PREEMPTED

GRACE_SECONDS = 5.0
"""How long after a bad end others are waited for: a learner that loses a peer ends as well, and may be the first to say
so. The peer is the one to name."""

IN_ORDER = (0, PREEMPTED, INTERRUPTED)
"""Exit codes of learners that ended together with the others."""


@dataclass(frozen=True)
class Place:
    """Which learner this is, and where they meet.

    Attributes:
      host: of learner 0, as the others reach it.
      port: of JAX's coordinator; the keepers' is the one after it.
      rank: of this learner.
      size: how many there are.
    """

    host: str
    port: int
    rank: int
    size: int

    @property
    def meeting(self) -> str:
        """Where the keepers meet."""
        return f"tcp://{self.host}:{self.port + 1}"


@dataclass
class Member:
    """A learner that has come.

    Attributes:
      name: host and process.
      heard: when it was last heard of.
      child_silent: seconds since its training process last gave a sign of life, as it says.
      code: of its end; None while it runs. Negative: the signal that ended it.
    """

    name: str
    heard: float
    child_silent: float = 0.0
    code: int | None = None


class Roll:
    """The roll of one run. Times are seconds of any one clock."""

    def __init__(self, size: int, now: float, gather_seconds: float, silence_seconds: float) -> None:
        """
        Args:
          size: learners that there are to be.
          now: the time.
          gather_seconds: until all have to be there.
          silence_seconds: after which a learner that says nothing is given up.
        """
        self.members: dict[int, Member] = {}
        self._size = size
        self._began = now
        self._gather, self._silence = gather_seconds, silence_seconds
        self._first_end: float | None = None
        self._wrong: str | None = None

    @property
    def complete(self) -> bool:
        """Whether all are there."""
        return len(self.members) == self._size

    @property
    def over(self) -> bool:
        """Whether all have ended in good order."""
        return self.complete and all(member.code in IN_ORDER for member in self.members.values())

    def heard(self, rank: int, size: int, name: str, child_silent: float, now: float) -> None:
        """A learner gave a sign of life, which says how many it thinks there are."""
        member = self.members.setdefault(rank, Member(name, now))
        if size != self._size or not 0 <= rank < self._size:
            self._wrong = f"{name} was started as learner {rank} of {size}, learner 0 as one of {self._size}"
        elif member.name != name:
            self._wrong = f"there are two learners {rank}: {member.name} and {name}"
        member.heard, member.child_silent = now, child_silent

    def ended(self, rank: int, code: int, now: float) -> None:
        """The training process of a learner has ended."""
        if self.members[rank].code is not None:
            return
        self.members[rank].code = code
        if code not in IN_ORDER and self._first_end is None:
            self._first_end = now

    def verdict(self, now: float) -> str | None:
        """Why all have to end; None while they need not."""
        if self._wrong is not None:
            return self._wrong
        if self._first_end is not None:
            return self._root(now) if now - self._first_end >= GRACE_SECONDS else None
        if not self.complete:
            return self._incomplete() if now - self._began >= self._gather else None
        for rank, member in self.members.items():
            if member.code is None and now - member.heard >= self._silence:
                silent = f"has not been heard of for {now - member.heard:.0f} s (learner.silence_seconds)"
                return f"learner {rank} ({member.name}) {silent}"
            if member.code is None and member.child_silent >= self._silence:
                return f"learner {rank} ({member.name}) hangs: no sign of life for {member.child_silent:.0f} s"
        return None

    def _incomplete(self) -> str:
        missing = ", ".join(str(rank) for rank in range(self._size) if rank not in self.members)
        here = ", ".join(f"{rank} ({member.name})" for rank, member in sorted(self.members.items()))
        return (
            f"learner {missing} of {self._size} has not come within {self._gather:g} s (learner.gather_seconds); "
            f"there are {here}"
        )

    def _root(self, now: float) -> str:
        """What the other ends follow from: silence, a signal, an error; JAX aborts those whose coordinator is gone."""
        found = []
        for rank, member in self.members.items():
            who = f"learner {rank} ({member.name})"
            if member.code is None and now - member.heard >= GRACE_SECONDS / 2:
                found.append((0, rank, f"{who} has not been heard of for {now - member.heard:.0f} s"))
            elif member.code is not None and member.code not in IN_ORDER:
                weight = 3 if member.code == -signal.SIGABRT else 1 if member.code < 0 else 2
                found.append((weight, rank, f"{who} {how(member.code)}"))
        return min(found)[2]


def how(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"was ended by {known.get(-code, f'signal {-code}')}"
