"""What is said on the stream of trajectories: credits to actors, events to the learner."""

from typing import NamedTuple, TypeAlias

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
      seconds: where the actor's time went during this unroll, by activity.
    """

    actor_id: int
    stamp: Stamp
    trajectory: Trajectory
    episodes: list[Episode]
    seconds: dict[str, float]


class Lost(NamedTuple):
    """So many trajectories of an actor never arrived (its sequence has a gap); they used up as many credits."""

    actor_id: int
    trajectories: int


class MessageRejected(NamedTuple):
    """A message that was not taken.

    Attributes:
      actor_id: who sent it, None when it did not say.
      reason: see `Rejected`.
      detail: for people.
      spent: it was a trajectory that used up one credit.
    """

    actor_id: int | None
    reason: str
    detail: str
    spent: bool


Event: TypeAlias = Joined | Requested | Arrived | Lost | MessageRejected
