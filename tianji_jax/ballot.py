"""What all learners of a world must do at the same update is voted on, and each update carries the vote.

A learner that stops by itself leaves the others waiting for it in the next update's collectives. So each puts its vote
into its share of the batch, the update adds the votes up over all devices, and every learner reads the same sums. They
act on them `DELAY` updates later, when all have them, so that nobody ever waits for an update only to count.
"""

import threading
from collections import deque
from typing import NamedTuple

import jax
import numpy as np

from tianji_jax.learner import UPDATES_IN_FLIGHT, LearnerState, Outputs
from tianji_jax.metrics import Meter
from tianji_jax.parallel import Parallel, Step
from tianji_jax.types import DATA_AXIS, ArraySpec, PyTree
from tianji_jax.worker import POLL_SECONDS

DELAY = UPDATES_IN_FLIGHT
"""Updates between a vote and what is done about it; by then the learner has waited for that update anyway."""


class Votes(NamedTuple):
    """One learner's votes, or the sums over all.

    Attributes:
      steps: environment steps since the vote before.
      full: learners whose window of episodes is full.
      window_return: sum of the mean returns of those windows.
      leave: learners that want to stop.
    """

    steps: float
    full: float
    window_return: float
    leave: float


VOTES_SPEC = ArraySpec((len(Votes._fields),), np.dtype(np.float32))
"""Of one device's share; exact for whole numbers up to 2**24, many more steps than an update takes."""


def with_votes(step: Step) -> Step:
    """An update that also adds up votes: `(state, (shard, votes)) -> (state, outputs with votes)`."""

    def voted(state: LearnerState, batch: tuple[PyTree, jax.Array]) -> tuple[LearnerState, Outputs]:
        shard, votes = batch
        state, outputs = step(state, shard)
        return state, outputs._replace(votes=jax.lax.psum(votes, DATA_AXIS))

    return voted


class Ballot:
    """One learner's side of the votes.

    Attributes:
      leave: set when this learner wants to stop; all then stop after the same update.
    """

    def __init__(self, learners: int, meter: Meter, version: int) -> None:
        """
        Args:
          learners: how many there are.
          meter: of this learner; what the others counted is added to it.
          version: at the start.
        """
        self.leave = threading.Event()
        self._learners = learners
        self._meter = meter
        self._start = version
        self._steps = meter.environment_steps
        self._own_steps = meter.own_steps
        # Of the votes that are not decided yet: as many as updates are in flight.
        self._cast_steps: deque[float] = deque()
        self._counted: dict[int, Votes] = {}
        self._decided = version
        self._outcome: Outcome | None = None
        self._news = threading.Condition()

    def bind(self, step: Step, parallel: Parallel) -> Step:
        """The compiled update as the learner calls it, with this learner's votes filled in."""

        def voting(state: PyTree, shards: PyTree) -> tuple[PyTree, PyTree]:
            votes = np.zeros((len(parallel.local), len(Votes._fields)), np.float32)
            votes[0] = self._cast()
            result: tuple[PyTree, PyTree] = step(state, (shards, parallel.shard(list(votes))))
            return result

        return voting

    def count(self, version: int, sums: PyTree) -> None:
        """The votes of the update that made `version`; from the publisher's thread."""
        votes = Votes(*np.asarray(sums).tolist())
        with self._news:
            self._counted[version] = votes
            self._news.notify_all()

    def outcome(self, version: int, stop: threading.Event) -> "Outcome | None":
        """What the learners know together after `version`; None while there was no vote, and where `stop` is set.

        For the learner's thread.
        """
        version -= DELAY
        if version <= self._start:
            return None
        if version > self._decided:
            votes = self._wait_for(version, stop)
            if votes is None:
                return None
            self._decided = version
            self._meter.elsewhere(round(votes.steps - self._cast_steps.popleft()))
            self._steps += round(votes.steps)
            mean = votes.window_return / self._learners if votes.full == self._learners else None
            self._outcome = Outcome(self._steps, mean, votes.leave > 0)
        return self._outcome

    def _wait_for(self, version: int, stop: threading.Event) -> Votes | None:
        with self._news:
            while version not in self._counted:
                if stop.is_set():
                    return None
                self._news.wait(POLL_SECONDS)
            return self._counted.pop(version)

    def _cast(self) -> Votes:
        steps, mean = self._meter.own_steps, self._meter.window_return
        self._cast_steps.append(steps - self._own_steps)
        self._own_steps = steps
        return Votes(self._cast_steps[-1], float(mean is not None), mean or 0.0, float(self.leave.is_set()))


class Outcome(NamedTuple):
    """What the learners agree upon.

    Attributes:
      environment_steps: of all learners together.
      window_return: mean over the learners' full windows of episodes; None while one is not full.
      leave: whether one of them wants to stop.
    """

    environment_steps: int
    window_return: float | None
    leave: bool
