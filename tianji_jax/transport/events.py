"""What is said on the stream of trajectories: credits to actors, events to the learner."""

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tianji_jax.transport.codec import Header, Rejected
from tianji_jax.types import Episode, Stamp, Trajectory


class Refused(RuntimeError):
    """The learner does not take this actor; the message says why."""


class Credit(NamedTuple):
    """Permission to send one trajectory.

    Attributes:
      version: act with parameters of at least this version (in lock-step mode: of exactly this version).
    """

    version: int


class Joined(NamedTuple):
    """An actor said hello. What an earlier actor of the same id still had in credits will not be used any more."""

    actor_id: int


class Requested(NamedTuple):
    """An actor asks for one credit."""

    actor_id: int


class Arrived(NamedTuple):
    """A trajectory; it used up one credit. Its arrays are read-only and valid as long as they are referred to.

    Attributes:
      stamp: where it comes from; `stamp.actor_id` is `actor_id`.
      trajectory: a `Trajectory` of NumPy arrays as the codec's spec says.
      episodes: those that finished.
      seconds: where the actor's time went since it sent the one before, by stage.
      sent: when it was sent, in Unix time by the actor's clock.
    """

    actor_id: int
    stamp: Stamp
    trajectory: Trajectory
    episodes: list[Episode]
    seconds: dict[str, float]
    sent: float


class Lost(NamedTuple):
    """So many trajectories of an actor never arrived (its sequence has a gap); they used up as many credits."""

    actor_id: int
    trajectories: int


class MessageRejected(NamedTuple):
    """A message that was not taken.

    Attributes:
      actor_id: who sent it, None for one who has not joined.
      reason: see `Rejected`.
      detail: for people.
      spent: it was a trajectory that used up one credit.
    """

    actor_id: int | None
    reason: str
    detail: str
    spent: bool


Event: TypeAlias = Joined | Requested | Arrived | Lost | MessageRejected


def read_episodes(header: Header) -> list[Episode]:
    """The finished episodes in the header of a trajectory; raises `Rejected` where they are not what they should be."""
    packed: list[Any] = [header.get("returns"), header.get("lengths")]
    if not all(isinstance(part, bytes) and len(part) % 8 == 0 for part in packed):
        raise Rejected("malformed", "episodes are not two arrays of 8-byte numbers")
    returns, lengths = np.frombuffer(packed[0], "<f8"), np.frombuffer(packed[1], "<i8")
    if len(returns) != len(lengths) or (lengths < 0).any():
        raise Rejected("malformed", f"{len(returns)} episode returns and {len(lengths)} lengths")
    if not np.isfinite(returns).all():
        raise Rejected("non_finite", "an episode return is not finite")
    return [Episode(*pair) for pair in zip(returns.tolist(), lengths.tolist(), strict=True)]


def read_seconds(header: Header) -> dict[str, float]:
    """The times by stage in the header of a trajectory; raises `Rejected` where they are not what they should be."""
    seconds: Any = header.get("seconds")
    if not isinstance(seconds, dict) or not all(
        isinstance(name, str) and isinstance(value, float) and 0 <= value < float("inf")
        for name, value in seconds.items()
    ):
        raise Rejected("malformed", f"seconds are {seconds!r:.80}; names with finite numbers are expected")
    return seconds


def read_sent(header: Header) -> float:
    """When a trajectory was sent; raises `Rejected` where that is no time."""
    sent: Any = header.get("sent")
    if not isinstance(sent, float) or not 0 <= sent < float("inf"):
        raise Rejected("malformed", f"sent is {sent!r:.80}; a finite number of seconds is expected")
    return sent
