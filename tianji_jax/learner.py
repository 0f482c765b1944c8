"""The learner: one sharded update after another, and the parameters that come of them."""

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tianji_jax.agent import Agent
from tianji_jax.config import BalanceConfig, StalenessConfig
from tianji_jax.device_queue import Arrival, DeviceQueue, ReadyBatch, Shard
from tianji_jax.parallel import Step
from tianji_jax.receiver import Pipeline
from tianji_jax.staleness import Verdict
from tianji_jax.transport import ParameterServer
from tianji_jax.types import DATA_AXIS, Batch, PyTree
from tianji_jax.worker import POLL_SECONDS

UPDATES_IN_FLIGHT = 2
"""Updates that may be dispatched and not yet finished: one runs, the next waits behind it on the device."""

UPDATES_HELD = UPDATES_IN_FLIGHT + 2
"""Updates whose batch and outputs stay on the devices: beside those in flight the one that the publisher has in hand,
and the one that the learner waits to hand over."""

REUSE_POLL_SECONDS = 0.002
"""How often a starving learner looks whether it may use its batch again."""


class LearnerState(NamedTuple):
    """All that an update changes, on the devices.

    Attributes:
      train_state: the agent's.
      rng: key of the next update.
      version: int32 scalar; the policy version, one more after each update.
      bad_updates: int32 scalar; non-finite updates in a row, each of them skipped.
    """

    train_state: PyTree
    rng: jax.Array
    version: jax.Array
    bad_updates: jax.Array


class Outputs(NamedTuple):
    """What an update leaves for the host to fetch.

    Attributes:
      params: a copy of the actors' parameters that the next update does not overwrite.
      metrics: float32 scalars, averaged over the devices.
      bad_updates: as in `LearnerState`.
      votes: sums of the learners' votes (`Ballot`); empty where there is one learner.
    """

    params: PyTree
    metrics: dict[str, jax.Array]
    bad_updates: jax.Array
    votes: PyTree = ()


def init_state(agent: Agent, seed: int | np.integer) -> LearnerState:
    """The state before the first update; `seed` may be traced."""
    params_rng, rng = jax.random.split(jax.random.fold_in(jax.random.key(seed), 0))
    zero = jnp.zeros((), jnp.int32)
    return LearnerState(agent.init(params_rng), rng, zero, zero)


def update_step(agent: Agent, staleness: StalenessConfig) -> Step:
    """The update as one device sees it: `(LearnerState, Shard) -> (LearnerState, Outputs)`, for `Parallel.compile`.

    It measures each trajectory's lag, weighs the valid steps, lets the agent learn, and keeps the old training state
    on all devices if the new one is not finite.
    """

    def step(state: LearnerState, shard: Shard) -> tuple[LearnerState, Outputs]:
        next_rng, rng = jax.random.split(state.rng)
        rng = jax.random.fold_in(rng, jax.lax.axis_index(DATA_AXIS))
        lag = state.version - shard.policy_version
        valid = jnp.asarray(shard.trajectory.valid, jnp.float32)
        share = jax.lax.pmean(jnp.mean(valid), DATA_AXIS)
        stale = lag > staleness.fresh_lag if staleness.correct else jnp.zeros_like(lag, bool)
        batch = Batch(shard.trajectory, lag, stale, valid / jnp.maximum(share, jnp.finfo(jnp.float32).tiny))
        train_state, metrics = agent.update(state.train_state, batch, rng, DATA_AXIS)
        metrics = {name: jax.lax.pmean(jnp.asarray(x, jnp.float32), DATA_AXIS) for name, x in metrics.items()}
        good = all_finite((train_state, metrics.get("loss", ())))
        train_state = jax.tree.map(lambda new, old: jnp.where(good, new, old), train_state, state.train_state)
        bad_updates = jnp.where(good, 0, state.bad_updates + 1)
        params = jax.tree.map(jnp.copy, agent.actor_params(train_state))
        return (
            LearnerState(train_state, next_rng, state.version + 1, bad_updates),
            Outputs(params, metrics, bad_updates),
        )

    return step


def all_finite(tree: PyTree) -> jax.Array:
    """Whether every floating-point value is finite, on every device."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))
    return jax.lax.pmin(finite.astype(jnp.int32), DATA_AXIS) == 1


class Learner:
    """Consumes batches and hands the outputs of its updates to a `Publisher`; never waits for the devices."""

    def __init__(
        self,
        state: LearnerState,
        step: Step,
        devices: DeviceQueue,
        pipeline: Pipeline,
        balance: BalanceConfig,
        publisher: "Publisher",
    ) -> None:
        self.state = state
        self._step = step
        self._devices = devices
        self._pipeline = pipeline
        self._balance = balance
        self._publisher = publisher
        self._stopwatch = pipeline.stopwatch("dispatcher")
        self._ready: ReadyBatch | None = None
        self._passes = 0

    def run(self, stop: threading.Event, finished: Callable[[], bool]) -> None:
        """Update until `finished()`, which is asked after each update, or until `stop` is set."""
        while not stop.is_set() and not finished():
            ready = self._devices.get(0.0)
            if ready is None and self._may_reuse():
                self._reuse(stop)
                continue
            # Wait only shortly while a reuse may become possible: the update before has to finish first.
            waiting_for_reuse = self._passes < self._balance.max_reuse
            if ready is None:
                with self._stopwatch("waiting"):
                    ready = self._devices.get(REUSE_POLL_SECONDS if waiting_for_reuse else POLL_SECONDS)
            if ready is not None:
                self._consume(ready, stop)

    def _consume(self, ready: ReadyBatch, stop: threading.Event) -> None:
        pipeline, trajectories = self._pipeline, len(ready.arrivals)
        for arrival in ready.arrivals:
            pipeline.meter.experience(arrival.steps, arrival.episodes)
        if self._young_enough(ready):
            pipeline.ledger.consume(trajectories)
            pipeline.meter.consumed(*self._lags(ready))
            self._ready, self._passes = ready, 0
            self._update(stop)
        else:
            pipeline.ledger.drop(trajectories)
        pipeline.release(trajectories)

    def _reuse(self, stop: threading.Event) -> None:
        assert self._ready is not None
        steps = sum(arrival.steps for arrival in self._ready.arrivals)
        self._pipeline.meter.reused(steps, *self._lags(self._ready))
        self._passes += 1
        self._update(stop)

    def _update(self, stop: threading.Event) -> None:
        assert self._ready is not None
        version = self._pipeline.version + 1
        with self._stopwatch("dispatching", version=version):
            for arrival in self._ready.arrivals:
                self._stopwatch.arrow(arrival.stamp, "f")
            self.state, outputs = self._step(self.state, self._ready.shards)
            self._pipeline.version = version
            self._publisher.put(Update(version, self._ready.shards, outputs), stop)

    def _judge(self, arrival: Arrival) -> Verdict:
        return self._pipeline.staleness.judge(arrival.stamp.policy_version, self._pipeline.version)

    def _young_enough(self, ready: ReadyBatch) -> bool:
        return all(self._judge(arrival) is not Verdict.TOO_OLD for arrival in ready.arrivals)

    def _lags(self, ready: ReadyBatch) -> tuple[list[int], int]:
        """Lag of each trajectory, and the environment steps of those the loss has to correct for."""
        lags = [self._pipeline.version - arrival.stamp.policy_version for arrival in ready.arrivals]
        corrected = sum(arrival.steps for arrival in ready.arrivals if self._judge(arrival) is Verdict.STALE)
        return lags, corrected

    def _may_reuse(self) -> bool:
        """Another pass needs a batch that is still young, importance weights that still carry it, and slack."""
        if self._ready is None or self._passes >= self._balance.max_reuse or not self._young_enough(self._ready):
            return False
        ess = self._publisher.ess(self._pipeline.version)
        if ess is None or ess < self._balance.min_ess:
            return False
        return self._pipeline.balance.can_reuse(self._pipeline.version)


class Update(NamedTuple):
    """An update that has been started.

    Attributes:
      version: that it makes.
      shards: that it learns from.
      outputs: that it leaves.
    """

    version: int
    shards: PyTree
    outputs: Outputs


class Publisher:
    """Fetches what updates leave on the devices, so that the learner never waits: parameters go to the actors, metrics
    to the meter.

    Attributes:
      count: is called with the version and the votes of each update.
      check: is called with the metrics of each update; what it raises ends the run.
    """

    def __init__(self, server: ParameterServer, pipeline: Pipeline, max_bad_updates: int) -> None:
        self.count: Callable[[int, PyTree], None] = lambda version, votes: None
        self.check: Callable[[dict[str, float]], None] = lambda metrics: None
        self._server = server
        self._pipeline = pipeline
        self._max_bad_updates = max_bad_updates
        # It waits for the devices: what it does is what they do.
        self._stopwatch = pipeline.stopwatch("learner")
        self._outbox: queue.Queue[Update] = queue.Queue(UPDATES_IN_FLIGHT)
        self._latest: tuple[int, float] = (-1, 0.0)

    def put(self, update: Update, stop: threading.Event) -> None:
        """Hand over an update; waits while too many are in flight."""
        while not stop.is_set():
            try:
                self._outbox.put(update, timeout=POLL_SECONDS)
            except queue.Full:
                continue
            return

    def ess(self, version: int) -> float | None:
        """Effective sample size (a fraction) measured by the update that made `version`; None until it is known.

        1 for agents that do not measure it.
        """
        latest, ess = self._latest
        return ess if latest == version else None

    def run(self, stop: threading.Event) -> None:
        """Publish until `stop` is set, and then what is left."""
        while not (stop.is_set() and self._outbox.empty()):
            try:
                with self._stopwatch("waiting"):
                    version, shards, outputs = self._outbox.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            with self._stopwatch("transfer", version=version):
                jax.block_until_ready(shards)
            with self._stopwatch("updating", version=version):
                jax.block_until_ready(outputs)
            with self._stopwatch("publishing", version=version):
                self.publish(version, outputs.params)
            metrics = {name: float(value) for name, value in outputs.metrics.items()}
            self._latest = (version, metrics.get("ess", 1.0))
            self.count(version, outputs.votes)
            bad_updates = int(outputs.bad_updates)
            self._pipeline.meter.updated(metrics, skipped=bad_updates > 0)
            self._check_finite(bad_updates)
            self.check(metrics)

    def publish(self, version: int, params: PyTree) -> None:
        """Fetch parameters from the devices and give them to the actors."""
        self._server.publish(version, jax.tree.map(np.asarray, params))
        self._pipeline.published = version

    def _check_finite(self, bad_updates: int) -> None:
        if bad_updates >= self._max_bad_updates:
            raise FloatingPointError(
                f"{bad_updates} updates in a row gave values that are not finite (learner.max_bad_updates="
                f"{self._max_bad_updates}); the parameters are those before them. A smaller agent.learning_rate or "
                "agent.max_gradient_norm often helps"
            )


def first_params(agent: Agent, state: LearnerState) -> PyTree:
    """The actors' parameters before the first update, in buffers of their own: the update overwrites `state`."""
    return jax.jit(lambda train_state: jax.tree.map(jnp.copy, agent.actor_params(train_state)))(state.train_state)
