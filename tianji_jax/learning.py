"""How a run learns: from each trajectory once, or from replay."""

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tianji_jax.agent import ReplayAgent
from tianji_jax.ballot import VOTES_SPEC, Ballot, with_votes
from tianji_jax.blueprint import Blueprint
from tianji_jax.checkpoint import Saved
from tianji_jax.config import ConfigError
from tianji_jax.device_queue import DeviceQueue, Shard
from tianji_jax.learner import Learner, LearnerState, Publisher, update_step
from tianji_jax.metrics import Report
from tianji_jax.parallel import Parallel, Step
from tianji_jax.receiver import Pipeline
from tianji_jax.replay_config import ReplayConfig
from tianji_jax.staleness import StalenessFilter
from tianji_jax.types import PyTree

if TYPE_CHECKING:
    from tianji_jax.replay_learner import ReplayLearner


class Learning(Protocol):
    """What a run needs to know of how it learns. Making one traces its programs and starts nothing."""

    def staleness_filter(self) -> StalenessFilter:
        """What trajectories may be learned from."""

    def compile(self) -> None:
        """Compile its programs, on any thread, before `learner` is called."""

    def learner(
        self,
        state: LearnerState,
        devices: DeviceQueue,
        pipeline: Pipeline,
        publisher: Publisher,
        ballot: Ballot | None,
    ) -> "Learner | ReplayLearner":
        """The learner, when its programs are compiled; `ballot` where there are several."""

    def report(self) -> Report:
        """What it adds to a report."""

    def headings(self) -> list[str]:
        """What it adds to the heading of a run."""

    def resume(self, folder: Path, saved: Saved) -> None:
        """Go on from a checkpoint in the run's folder, as far as that is not in the learner's state."""

    def contents(self) -> list[np.ndarray] | None:
        """What a checkpoint has to hold for that; on the learner's thread, or when that has ended."""


def make_learning(blueprint: Blueprint, parallel: Parallel, state: PyTree, shard: Shard) -> Learning:
    """The way the agent learns.

    Args:
      blueprint: of the run.
      parallel: the devices.
      state: spec of the learner's state.
      shard: spec of one device's part of a batch, `ArraySpec` leaves.

    Raises:
      ConfigError: the configuration does not go with it, or the replay does not fit into memory.
      ValueError: the agent cannot learn from batches or samples of these shapes.
    """
    if not isinstance(blueprint.agent, ReplayAgent):
        return OnPolicy(blueprint, parallel, state, shard)
    # Imported where it is needed: flashbax takes most of a second, which no other run should pay.
    from tianji_jax.off_policy import OffPolicy

    return OffPolicy(blueprint, parallel, state, shard)


def on_policy_update(blueprint: Blueprint, shard: Shard) -> tuple[Step, PyTree]:
    """The update of an agent that learns from each trajectory as it comes, and the spec of what it takes.

    Raises:
      ConfigError: there are settings for a replay, which it does not have.
    """
    config = blueprint.config
    if config.replay != ReplayConfig():
        raise ConfigError(
            f"replay: {config.agent['name']} learns from each trajectory as it comes and has no replay: "
            "leave the section out"
        )
    step = update_step(blueprint.agent, config.staleness)
    return (step, shard) if blueprint.world.alone else (with_votes(step), (shard, VOTES_SPEC))


class OnPolicy:
    """Each batch goes into one update (or some more, `balance.max_reuse`)."""

    def __init__(self, blueprint: Blueprint, parallel: Parallel, state: PyTree, shard: Shard) -> None:
        self._config, self._parallel = blueprint.config, parallel
        step, batch = on_policy_update(blueprint, shard)
        self._lowered = parallel.lower(step, state, batch)
        self._step: Step

    def staleness_filter(self) -> StalenessFilter:
        return StalenessFilter(self._config.staleness.fresh_lag, self._config.staleness.max_lag)

    def compile(self) -> None:
        self._step = self._lowered.compile()

    def learner(
        self,
        state: LearnerState,
        devices: DeviceQueue,
        pipeline: Pipeline,
        publisher: Publisher,
        ballot: Ballot | None,
    ) -> Learner:
        step = self._step if ballot is None else ballot.bind(self._step, self._parallel)
        return Learner(state, step, devices, pipeline, self._config.balance, publisher)

    def report(self) -> Report:
        return {}

    def headings(self) -> list[str]:
        return []

    def resume(self, folder: Path, saved: Saved) -> None:
        pass

    def contents(self) -> None:
        return None
