"""Batches: every value in its place on its device, and copied no more than once."""

import threading

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tianji_jax.device_queue import Arrival, BatchAssembler, DeviceQueue
from tianji_jax.metrics import Meter
from tianji_jax.parallel import Parallel
from tianji_jax.stopwatch import Stopwatch
from tianji_jax.timeline import Timeline
from tianji_jax.types import ArraySpec, DiscreteActions, EnvSpec, Stamp, Trajectory, trajectory_spec

T = 3


def make_spec(environments: int) -> Trajectory:
    env = EnvSpec(
        "test", {"image": ArraySpec((2, 2), np.uint8), "vector": ArraySpec((3,), np.float32)}, DiscreteActions(4)
    )
    return trajectory_spec(
        env, T, environments, {"log_prob": ArraySpec((), np.float32)}, (ArraySpec((5,), np.float32),)
    )


def make_arrival(spec: Trajectory, sequence: int, rng: np.random.Generator) -> Arrival:
    trajectory = jax.tree.map(lambda s: rng.integers(0, 2, s.shape).astype(s.dtype), spec)
    return Arrival(Stamp(10 + sequence, 0, sequence), trajectory, [], int(trajectory.valid.sum()))


@given(st.integers(1, 5), st.integers(1, 6), st.sampled_from([1, 2, 3, 4]), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_shards_are_slices_of_all_trajectories_side_by_side(
    trajectories: int, environments: int, shards: int, seed: int
) -> None:
    spec, rng = make_spec(environments), np.random.default_rng(seed)
    if trajectories * environments % shards:
        with pytest.raises(ValueError, match="cannot be divided"):
            BatchAssembler(spec, trajectories, shards)
        return
    assembler = BatchAssembler(spec, trajectories, shards)
    arrivals = [make_arrival(spec, n, rng) for n in range(trajectories)]
    width = trajectories * environments // shards
    assembled = assembler.assemble(arrivals)
    assert len(assembled) == shards
    for index, shard in enumerate(assembled):
        mine = slice(index * width, (index + 1) * width)
        for name in Trajectory._fields:
            axis = 0 if name == "state" else 1
            whole = jax.tree.map(
                lambda *leaves, axis=axis: np.concatenate(leaves, axis),
                *[getattr(arrival.trajectory, name) for arrival in arrivals],
            )
            expected = jax.tree.map(lambda x, axis=axis, mine=mine: x[mine] if axis == 0 else x[:, mine], whole)
            jax.tree.map(np.testing.assert_array_equal, getattr(shard.trajectory, name), expected)
        versions = np.repeat([10 + n for n in range(trajectories)], environments)[mine]
        np.testing.assert_array_equal(shard.policy_version, versions)
        jax.tree.map(
            lambda x, s: (x.shape, x.dtype) == (s.shape, s.dtype) or pytest.fail(f"{x.shape} {x.dtype}, not {s}"),
            shard,
            assembler.shard_spec(spec),
        )


def test_a_trajectory_that_is_a_whole_shard_is_not_copied() -> None:
    spec = make_spec(4)
    arrivals = [make_arrival(spec, n, np.random.default_rng(n)) for n in range(2)]
    for arrival, shard in zip(arrivals, BatchAssembler(spec, 2, 2).assemble(arrivals), strict=True):
        jax.tree.map(lambda a, b: a is b or pytest.fail("copied"), arrival.trajectory, shard.trajectory)


@pytest.mark.parametrize("mode", ["pmap", "shard_map"])
def test_the_queue_is_first_in_first_out_bounded_and_tells_its_size(mode: str) -> None:
    spec = make_spec(4)
    parallel = Parallel(jax.devices()[:2], mode)  # type: ignore[arg-type]
    assembler = BatchAssembler(spec, 1, 2)
    queue = DeviceQueue(parallel, assembler, assembler.shard_spec(spec), 2, Stopwatch("batcher", Meter(), Timeline()))
    stop, rng = threading.Event(), np.random.default_rng(0)
    arrivals = [make_arrival(spec, n, rng) for n in range(3)]
    assert queue.put(arrivals[:1], stop)
    assert queue.put(arrivals[1:2], stop)
    done = threading.Event()
    blocked = threading.Thread(target=lambda: (queue.put(arrivals[2:], stop), done.set()))
    blocked.start()
    assert not done.wait(0.3)
    first = queue.get(1.0)
    assert done.wait(2)
    blocked.join()
    assert first is not None
    assert first.arrivals[0].stamp.sequence == 0
    assert first.arrivals[0].trajectory is None
    assert queue.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(first.shards))
    for device in range(2):
        np.testing.assert_array_equal(
            first.shards.trajectory.reward[device], arrivals[0].trajectory.reward[:, 2 * device : 2 * device + 2]
        )
    assert {shard.device for shard in first.shards.trajectory.reward.addressable_shards} == set(parallel.devices)
    assert len(queue) == 2


def test_a_full_queue_lets_go_when_told_to_stop() -> None:
    spec = make_spec(2)
    parallel = Parallel(jax.devices()[:1], "pmap")
    assembler = BatchAssembler(spec, 1, 1)
    queue = DeviceQueue(parallel, assembler, assembler.shard_spec(spec), 1, Stopwatch("batcher", Meter(), Timeline()))
    stop = threading.Event()
    arrival = make_arrival(spec, 0, np.random.default_rng(0))
    assert queue.put([arrival], stop)
    threading.Timer(0.2, stop.set).start()
    assert not queue.put([arrival], stop)
    assert queue.get(0.0) is not None
    assert queue.get(0.01) is None
