"""The learner of off-policy agents: trajectories go into replay, updates learn from what is drawn there."""

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from tianji_jax.agent import Agent, Metrics, ReplayAgent
from tianji_jax.device_queue import DeviceQueue, ReadyBatch, Shard
from tianji_jax.learner import LearnerState, Outputs, Publisher, Update, all_finite
from tianji_jax.parallel import Places
from tianji_jax.rate_limiter import RateLimiter
from tianji_jax.receiver import Pipeline
from tianji_jax.replay import Replay, ReplayState
from tianji_jax.types import DATA_AXIS, PyTree, Sample, SampledUnrolls
from tianji_jax.worker import POLL_SECONDS

INSERT = Places(arguments=(True, True), results=(True,))
"""Of `insert_step`."""

UPDATE = Places(arguments=(False, True), results=(False, True, False), donated=(0, 1))
"""Of `replay_update_step`."""


def insert_step(replay: Replay) -> Callable[[ReplayState, Shard], tuple[ReplayState]]:
    """What puts a shard into one device's replay, for `Parallel.lower`."""
    return lambda held, shard: (replay.insert(held, shard),)


def replay_update_step(
    agent: ReplayAgent, replay: Replay
) -> Callable[[LearnerState, ReplayState], tuple[LearnerState, ReplayState, Outputs]]:
    """The update as one device sees it, for `Parallel.lower`.

    `replay.gradient_steps` times it draws a sample, lets the agent learn from it and sets the priorities; the old
    training state stays on all devices if the new one is not finite.
    """
    count = replay.config.gradient_steps

    def step(state: LearnerState, held: ReplayState) -> tuple[LearnerState, ReplayState, Outputs]:
        next_rng, rng = jax.random.split(state.rng)
        rngs = jax.random.split(jax.random.fold_in(rng, jax.lax.axis_index(DATA_AXIS)), count)
        once = functools.partial(_gradient_step, agent, replay, state.version)
        carry = (state.train_state, held, state.bad_updates)
        if count == 1:  # a loop costs some of XLA's optimisations
            carry, metrics = once(carry, rngs[0])
        else:
            carry, metrics = jax.lax.scan(once, carry, rngs)
            metrics = jax.tree.map(lambda x: jnp.mean(x, axis=0), metrics)
        train_state, held, bad_updates = carry
        params = jax.tree.map(jnp.copy, cast(Agent, agent).actor_params(train_state))
        return (
            LearnerState(train_state, next_rng, state.version + 1, bad_updates),
            held,
            Outputs(params, metrics, bad_updates),
        )

    return step


_Carry = tuple[PyTree, ReplayState, jax.Array]
"""Training state, replay, and non-finite gradient steps in a row."""


def _gradient_step(
    agent: ReplayAgent, replay: Replay, version: jax.Array, carry: _Carry, rng: jax.Array
) -> tuple[_Carry, Metrics]:
    before, held, bad = carry
    sample_rng, agent_rng = jax.random.split(rng)
    sample, place = replay.sample(held, sample_rng, version)
    train_state, metrics, priority = agent.learn(before, sample, agent_rng, DATA_AXIS)
    good = all_finite((train_state, metrics.get("loss", ())))
    train_state = jax.tree.map(lambda new, old: jnp.where(good, new, old), train_state, before)
    held = replay.reprioritise(held, place, jnp.where(good, priority, jnp.nan))
    metrics = {
        **metrics,
        "priority": jnp.mean(jnp.abs(priority)),
        "importance_weight": jnp.mean(sample.weight),
        "sample_age": _mean_age(sample),
    }
    if replay.stacks.frames is not None:
        metrics["torn_stacks"] = jax.lax.psum(held.torn, DATA_AXIS)
    metrics = {name: jax.lax.pmean(jnp.asarray(x, jnp.float32), DATA_AXIS) for name, x in metrics.items()}
    return (train_state, held, jnp.where(good, 0, bad + 1)), metrics


def _mean_age(sample: Sample | SampledUnrolls) -> jax.Array:
    """Of what was drawn on all devices; not a number where nothing could be."""
    drawn = sample.weight > 0
    ages, count = jax.lax.psum((jnp.sum(jnp.where(drawn, sample.age, 0)), jnp.sum(drawn)), DATA_AXIS)
    return ages / count


class ReplayPrograms(NamedTuple):
    """What a `ReplayLearner` works with.

    Attributes:
      replay: the functions in the programs.
      limiter: says when each may run.
      insert: `insert_step`, compiled.
      update: `replay_update_step`, compiled.
    """

    replay: Replay
    limiter: RateLimiter
    insert: Callable[..., Any]
    update: Callable[..., Any]


class ReplayLearner:
    """Inserts what arrives and updates, each when the rate limiter allows it; never waits for the devices."""

    def __init__(
        self,
        state: LearnerState,
        held: ReplayState,
        programs: ReplayPrograms,
        devices: DeviceQueue,
        pipeline: Pipeline,
        publisher: Publisher,
    ) -> None:
        """
        Args:
          state: before the next update.
          held: the replay, leaves `[D, ...]`.
          programs: that change it.
          devices: where batches come from.
          pipeline: shared with receiver and batcher.
          publisher: takes what updates leave.
        """
        self.state = state
        self.held = held
        self._programs = programs
        self._devices = devices
        self._pipeline = pipeline
        self._publisher = publisher
        publisher.check = lambda metrics: programs.replay.stacks.check(metrics.get("torn_stacks", 0.0))
        self._stopwatch = pipeline.stopwatch("dispatcher")
        self._ready: ReadyBatch | None = None

    def run(self, stop: threading.Event, finished: Callable[[], bool]) -> None:
        """Insert and update until `finished()`, which is asked after each, or until `stop` is set.

        What has arrived is inserted as soon as that is allowed, so that the actors go on; else an update is made. One
        of both is always allowed when a batch has arrived (`ReplayConfig.problem`).
        """
        limiter, samples = self._programs.limiter, self._programs.replay.samples_per_update
        while not stop.is_set() and not finished():
            self._ready = self._ready or self._devices.get(0.0)
            if self._ready is not None and limiter.can_insert(_steps(self._ready)):
                self._insert(self._ready)
                self._ready = None
            elif limiter.can_sample(samples):
                self._update(stop)
                limiter.sample(samples)
            else:
                with self._stopwatch("waiting"):
                    self._ready = self._devices.get(POLL_SECONDS)

    def _insert(self, ready: ReadyBatch) -> None:
        pipeline, trajectories = self._pipeline, len(ready.arrivals)
        with self._stopwatch("inserting"):
            for arrival in ready.arrivals:
                self._stopwatch.arrow(arrival.stamp, "f")
            (self.held,) = self._programs.insert(self.held, ready.shards)
        for arrival in ready.arrivals:
            pipeline.meter.experience(arrival.steps, arrival.episodes)
        pipeline.meter.consumed((pipeline.version - arrival.stamp.policy_version for arrival in ready.arrivals), 0)
        pipeline.ledger.consume(trajectories)
        pipeline.release(trajectories)
        self._programs.limiter.insert(_steps(ready))

    def _update(self, stop: threading.Event) -> None:
        version = self._pipeline.version + 1
        with self._stopwatch("dispatching", version=version):
            self.state, self.held, outputs = self._programs.update(self.state, self.held)
            self._pipeline.version = version
            self._publisher.put(Update(version, (), outputs), stop)


def _steps(ready: ReadyBatch) -> int:
    return sum(arrival.steps for arrival in ready.arrivals)
