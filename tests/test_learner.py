"""The update around the agent: lags, weights, skipping, reuse."""

import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tianji_jax.agent import AgentConfig, Metrics
from tianji_jax.balance import Balance
from tianji_jax.config import BalanceConfig, StalenessConfig
from tianji_jax.device_queue import Arrival, BatchAssembler, DeviceQueue, ReadyBatch
from tianji_jax.learner import Learner, Outputs, Publisher, Update, init_state, update_step
from tianji_jax.metrics import Meter
from tianji_jax.parallel import Parallel
from tianji_jax.receiver import Pipeline
from tianji_jax.staleness import Ledger, StalenessFilter
from tianji_jax.types import ArraySpec, Batch, DiscreteActions, EnvSpec, Stamp, Trajectory, trajectory_spec

T, B = 4, 4
ENV = EnvSpec("test", ArraySpec((2,), np.float32), DiscreteActions(2))
SPEC = trajectory_spec(ENV, T, B, {"log_prob": ArraySpec((), np.float32)}, ())


class Recorder:
    """An agent that reports what it was given, and counts how often it is traced."""

    class Config(AgentConfig):
        pass

    def __init__(self) -> None:
        self.traces = 0

    def init(self, rng: jax.Array) -> Any:
        return {"w": jnp.zeros(3)}

    def actor_params(self, train_state: Any) -> Any:
        return train_state

    def initial_state(self, batch_size: int) -> Any:
        return ()

    def act(self, *_: Any) -> Any:
        raise NotImplementedError

    def update(self, train_state: Any, batch: Batch, rng: jax.Array, axis_name: str) -> tuple[Any, Metrics]:
        self.traces += 1
        reward = jnp.mean(batch.weight * batch.trajectory.reward)
        gradient = jax.lax.pmean(reward, axis_name)
        metrics = {
            "lag": jnp.mean(batch.lag.astype(jnp.float32)),
            "stale": jnp.mean(batch.stale.astype(jnp.float32)),
            "reward": reward,
            "draw": jax.random.uniform(rng),
            "ess": jnp.float32(0.75),
        }
        return {"w": train_state["w"] + gradient}, metrics


def make_arrival(sequence: int, version: int, reward: float = 1.0, valid: np.ndarray | None = None) -> Arrival:
    trajectory = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), SPEC)
    valid = np.ones((T, B), bool) if valid is None else valid
    rewards = np.where(valid, reward, 1e6).astype(np.float32)
    return Arrival(Stamp(version, 0, sequence), trajectory._replace(reward=rewards, valid=valid), [], int(valid.sum()))


class Rig:
    """A learner with its queue and pipeline; the test plays receiver and publisher."""

    def __init__(self, devices: int = 1, balance: BalanceConfig | None = None, **staleness: Any) -> None:
        config = StalenessConfig(**staleness)
        self.agent = Recorder()
        self.parallel = Parallel(jax.devices()[:devices], "pmap")
        assembler = BatchAssembler(SPEC, 1, devices)
        shard_spec = assembler.shard_spec(SPEC)
        self.meter = Meter()
        # More credit than the law allows: these tests want to see what happens when it is broken.
        judge = StalenessFilter(config.fresh_lag, config.max_lag)
        self.pipeline = Pipeline(judge, Balance(8, 1), self.meter, Ledger())
        self.queue = DeviceQueue(self.parallel, assembler, shard_spec, 8, self.pipeline.stopwatch("batcher"))
        self.published: list[int] = []
        self.publisher = Publisher(self, self.pipeline, max_bad_updates=3)  # type: ignore[arg-type]
        state = self.parallel.init(lambda: init_state(self.agent, 0))
        step = self.parallel.lower(update_step(self.agent, config), self.parallel.spec(state), shard_spec).compile()
        self.learner = Learner(state, step, self.queue, self.pipeline, balance or BalanceConfig(), self.publisher)
        self.stop = threading.Event()

    def publish(self, version: int, params: Any) -> None:
        """In place of the parameter server's."""
        self.published.append(version)

    def feed(self, *arrivals: Arrival) -> None:
        for arrival in arrivals:
            self.pipeline.balance.request(0)
            self.pipeline.balance.grants(self.pipeline.version)
            self.pipeline.balance.arrive(0, arrival.stamp.policy_version)
            self.pipeline.ledger.queue()
            self.queue.put([arrival], self.stop)

    def run(self, updates: int, seconds: float = 5.0) -> None:
        """Run until so many updates are published, or for so long."""
        deadline = time.monotonic() + seconds
        publisher = threading.Thread(target=self.publisher.run, args=(self.stop,))
        publisher.start()
        target = self.pipeline.version + updates

        def finished() -> bool:
            return self.pipeline.version >= target or time.monotonic() > deadline

        timer = threading.Timer(seconds, self.stop.set)
        timer.start()
        self.learner.run(self.stop, finished)
        self.stop.set()
        timer.cancel()
        publisher.join(5)
        self.stop.clear()


def test_lag_staleness_and_weights_reach_the_agent() -> None:
    rig = Rig(devices=2, fresh_lag=1, max_lag=4)
    valid = np.ones((T, B), bool)
    valid[:, 0] = False
    rig.feed(*[make_arrival(n, version=0, valid=valid, reward=2.0) for n in range(4)])
    rig.run(4)
    report = rig.meter.report()
    assert report["learner/lag"] == pytest.approx((0 + 1 + 2 + 3) / 4)
    assert report["learner/stale"] == pytest.approx(2 / 4)
    # The mean over valid steps, though one device has fewer of them and invalid ones hold a million.
    assert report["learner/reward"] == pytest.approx(2.0)
    assert (report["policy_lag_min"], report["policy_lag_mean"], report["policy_lag_max"]) == (0, 1.5, 3)
    assert report["samples_corrected"] == 2 * int(valid.sum())
    assert report["environment_steps"] == 4 * int(valid.sum())
    assert rig.published == [1, 2, 3, 4]
    assert int(rig.learner.state.version) == rig.pipeline.version == 4
    assert rig.agent.traces == 1


def test_without_correction_nothing_is_marked() -> None:
    rig = Rig(fresh_lag=0, max_lag=4, correct=False)
    rig.feed(*[make_arrival(n, version=0) for n in range(3)])
    rig.run(3)
    assert rig.meter.report()["learner/stale"] == 0


def test_a_batch_that_grew_too_old_in_the_queue_is_dropped_and_counted() -> None:
    rig = Rig(max_lag=1)
    rig.feed(*[make_arrival(n, version=0) for n in range(4)])
    rig.run(4, seconds=1.0)
    counts = rig.pipeline.ledger.counts
    assert (counts.consumed, counts.dropped, counts.queued) == (2, 2, 0)
    assert rig.meter.report()["policy_lag_max"] == 1
    assert rig.pipeline.balance.outstanding == 0


def test_an_update_that_is_not_finite_is_skipped_on_all_devices_and_counted() -> None:
    rig = Rig(devices=2, max_lag=8)
    poison = make_arrival(1, 0)
    # Only the second device's shard is bad.
    poison.trajectory.reward[0, B - 1] = np.nan  # type: ignore[union-attr]
    rig.feed(make_arrival(0, 0), poison, make_arrival(2, 0))
    rig.run(3)
    report = rig.meter.report()
    assert report["updates_skipped"] == 1
    np.testing.assert_allclose(rig.learner.state.train_state["w"], 2.0)
    assert int(rig.learner.state.version) == 3


def test_too_many_bad_updates_in_a_row_end_the_run() -> None:
    rig = Rig(max_lag=8)
    outputs = Outputs({"w": jnp.zeros(3)}, {"loss": jnp.float32(np.nan)}, jnp.int32(3))
    rig.publisher.put(Update(1, (), outputs), rig.stop)
    with pytest.raises(FloatingPointError, match=r"3 updates in a row .*learner.max_bad_updates=3"):
        rig.publisher.run(rig.stop)


def test_a_starving_learner_reuses_its_batch_as_often_as_allowed() -> None:
    rig = Rig(balance=BalanceConfig(max_reuse=3, min_ess=0.5), max_lag=8)
    rig.feed(make_arrival(0, 0))
    rig.run(10, seconds=1.0)
    report = rig.meter.report()
    assert rig.pipeline.version == 1 + 3
    assert report["samples_reused"] == 3 * T * B
    assert report["environment_steps"] == T * B
    assert report["policy_lag_max"] == 3
    assert rig.pipeline.ledger.counts.consumed == 1


def test_reuse_ends_where_the_effective_sample_size_is_too_small() -> None:
    rig = Rig(balance=BalanceConfig(max_reuse=3, min_ess=0.8), max_lag=8)  # the agent reports 0.75
    rig.feed(make_arrival(0, 0))
    rig.run(10, seconds=1.0)
    assert rig.pipeline.version == 1


def test_reuse_never_goes_beyond_max_lag() -> None:
    rig = Rig(balance=BalanceConfig(max_reuse=10, min_ess=0), max_lag=2)
    rig.feed(make_arrival(0, 0))
    rig.run(20, seconds=1.0)
    assert rig.pipeline.version == 3
    assert rig.meter.report()["policy_lag_max"] == 2


def test_every_update_and_device_draws_differently_and_a_seed_repeats() -> None:
    draws = []
    for _ in range(2):
        rig = Rig(devices=2, max_lag=8)
        rig.feed(make_arrival(0, 0), make_arrival(1, 0))
        rig.run(1)
        first = rig.meter.report()["learner/draw"]
        rig.run(1)
        draws.append((first, rig.meter.report()["learner/draw"]))
    assert draws[0] == draws[1]
    assert draws[0][0] != draws[0][1]


def test_ready_batches_do_not_hold_host_arrays() -> None:
    rig = Rig(max_lag=1)
    rig.feed(make_arrival(0, 0))
    ready = rig.queue.get(1.0)
    assert isinstance(ready, ReadyBatch)
    assert isinstance(ready.shards.trajectory, Trajectory)
    assert ready.arrivals[0].trajectory is None
