"""How agents with replay learn: the replay, its learner, what resumes and what goes into reports."""

import sys
from pathlib import Path

import jax
import numpy as np

from tianji_jax.agent import ReplayAgent, ReplaySpec
from tianji_jax.ballot import Ballot
from tianji_jax.blueprint import Blueprint
from tianji_jax.checkpoint import Saved, restore_contents
from tianji_jax.config import Config, ConfigError
from tianji_jax.device_queue import DeviceQueue, Shard
from tianji_jax.learner import LearnerState, Publisher
from tianji_jax.metrics import Report
from tianji_jax.parallel import Parallel
from tianji_jax.rate_limiter import RateLimiter
from tianji_jax.receiver import Pipeline
from tianji_jax.replay import Replay, ReplayState
from tianji_jax.replay_learner import INSERT, UPDATE, ReplayLearner, ReplayPrograms, insert_step, replay_update_step
from tianji_jax.staleness import StalenessFilter
from tianji_jax.types import PyTree


class OffPolicy:
    """Batches go into replay, updates learn from samples of it."""

    def __init__(self, blueprint: Blueprint, parallel: Parallel, state: PyTree, shard: Shard) -> None:
        config, agent = blueprint.config, blueprint.agent
        assert isinstance(agent, ReplayAgent)
        _check(config, agent.replay, blueprint.world.alone)
        self._replay = Replay(config.replay, agent.replay, shard, parallel.num_devices)
        self._replay.check_memory(parallel.local[0])
        self._limiter = RateLimiter.of(config.replay, config.steps_per_update, self._replay.samples_per_update)
        self._config = config.replay
        self._from: tuple[Path, Saved] | None = None
        self._programs: ReplayPrograms
        self._learner: ReplayLearner
        self._parallel = parallel
        held = self._replay.state_spec
        self._insert = parallel.lower(insert_step(self._replay), held, shard, places=INSERT)
        self._update = parallel.lower(replay_update_step(agent, self._replay), state, held, places=UPDATE)

    def staleness_filter(self) -> StalenessFilter:
        """Trajectories may be of any age when they are inserted; `replay.max_lag` limits what is drawn."""
        return StalenessFilter(fresh_lag=sys.maxsize, max_lag=sys.maxsize)

    def compile(self) -> None:
        self._programs = ReplayPrograms(self._replay, self._limiter, self._insert.compile(), self._update.compile())

    def learner(
        self,
        state: LearnerState,
        devices: DeviceQueue,
        pipeline: Pipeline,
        publisher: Publisher,
        ballot: Ballot | None,
    ) -> ReplayLearner:
        held = self._restored() if self._from is not None else None
        if held is None:
            held = self._parallel.init_own(self._replay.init)
        self._learner = ReplayLearner(state, held, self._programs, devices, pipeline, publisher)
        return self._learner

    def report(self) -> Report:
        limiter, capacity = self._limiter, self._replay.capacity
        return {
            "samples": limiter.sampled,
            "samples_per_insert": limiter.samples_per_insert,
            "replay_steps": min(limiter.inserted, capacity),
            "replay_fill": min(limiter.inserted / capacity, 1.0),
        }

    def headings(self) -> list[str]:
        return [f"replay of {self._replay.capacity:,} steps in {self._replay.nbytes / 2**20:,.1f} MiB a device"]

    def resume(self, folder: Path, saved: Saved) -> None:
        if self._config.save:
            self._from = folder, saved._replace(state=None)

    def contents(self) -> list[np.ndarray] | None:
        if not self._config.save:
            return None
        # To the host at once: a second copy on the devices might not fit, and the next insert overwrites this one.
        return [*(np.array(x) for x in jax.tree.leaves(self._learner.held)), self._limiter.counts]

    def _restored(self) -> ReplayState | None:
        assert self._from is not None
        spec = self._parallel.own_spec(self._replay.state_spec)
        leaves, treedef = jax.tree.flatten(spec)
        found = restore_contents(*self._from, [*leaves, self._limiter.counts])
        if found is None:
            return None
        self._limiter.counts = found[-1]
        return jax.tree.unflatten(treedef, found[:-1])


def _check(config: Config, spec: ReplaySpec, alone: bool) -> None:
    """
    Raises:
      ConfigError: settings do not go with replay.
    """
    name = config.agent["name"]
    samples_per_update = config.replay.samples_per_update(spec.steps_per_draw(config.actors.unroll_length))
    problem = config.replay.problem(config.steps_per_update, samples_per_update)
    if config.run.deterministic:
        problem = f"run.deterministic: lock-step is for agents that learn as trajectories come; {name} has a replay"
    elif config.balance.max_reuse:
        problem = (
            f"balance.max_reuse={config.balance.max_reuse}: {name} learns from replay; what balances it is "
            "replay.samples_per_insert: set balance.max_reuse=0"
        )
    elif not alone:
        problem = f"agent.name: {name} learns from replay, which a single learner has: start it with `tianji train`"
    if problem is not None:
        raise ConfigError(problem)
