"""Replay on the devices: what is drawn, how often, with which weight, and what it costs."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from scipy import stats

from replays import Rig, Transition, random_shard, transitions
from tianji_jax.agent import ReplaySpec
from tianji_jax.config import ConfigError
from tianji_jax.replay_config import ReplayConfig

T, ROWS = 6, 3
MODES = pytest.mark.parametrize("mode", ["pmap", "shard_map"])
DEVICES = pytest.mark.parametrize("devices", [1, 4])


def config(**settings: Any) -> ReplayConfig:
    return ReplayConfig(**{"capacity": 4 * 4 * ROWS * T, "min_size": 1, "batch_size": 32, **settings})


def filled(rig: Rig, inserts: int, seed: int = 0) -> tuple[Rig, list[list[Any]]]:
    """The rig after so many inserts, and what was inserted: a list of one shard per device for each."""
    rng, inserted = np.random.default_rng(seed), []
    for index in range(inserts):
        numbers = [(index * 4 + device) * (T + 1) * ROWS for device in rig.range]
        recurrent = rig.replay.spec.unrolls
        inserted.append([random_shard(rng, T, ROWS, n, version=index, recurrent=recurrent) for n in numbers])
        rig.insert(*inserted[-1])
    return rig, inserted


def drawn(rig: Rig, draws: int, **settings: Any) -> list[tuple[float, Transition]]:
    found = []
    for _ in range(draws):
        sample, _ = rig.sample(**settings)
        number, after = sample.observation["number"], sample.next_observation["number"]
        rows = zip(number.flat, sample.reward.flat, sample.discount.flat, after.flat, sample.weight.flat, strict=True)
        found += [(float(n), Transition(r, d, a)) for n, r, d, a, weight in rows if weight > 0]
    return found


@MODES
@DEVICES
@pytest.mark.parametrize("n_step", [1, 3, T])
@pytest.mark.parametrize("inserts", [2, 7], ids=["not full", "wrapped"])
def test_every_valid_step_is_drawn_with_the_return_that_playing_on_gives(
    devices: int, mode: str, n_step: int, inserts: int
) -> None:
    spec = ReplaySpec(n_step, discount=0.9)
    slots = 4
    settings = config(capacity=slots * devices * ROWS * T)
    rig, inserted = filled(Rig(devices, settings, spec, mode=mode), inserts)
    held = inserted[-slots:]
    expected = dict(pair for shards in held for shard in shards for pair in transitions(shard, spec))
    found = drawn(rig, 60)
    assert {number for number, _ in found} == expected.keys()
    for number, transition in found:
        np.testing.assert_allclose(transition, expected[number], rtol=1e-5, atol=1e-6)


@MODES
@DEVICES
@pytest.mark.parametrize("inserts", [2, 7], ids=["not full", "wrapped"])
def test_unrolls_are_drawn_as_they_were_inserted(devices: int, mode: str, inserts: int) -> None:
    slots = 4
    settings = config(capacity=slots * devices * ROWS * T)
    rig, inserted = filled(Rig(devices, settings, ReplaySpec(unrolls=True), mode=mode), inserts)
    assert rig.replay.samples_per_update == 32 * T
    expected = {
        float(shard.trajectory.observation["number"][0, row]): (index, shard.trajectory, row)
        for index, shards in list(enumerate(inserted))[-slots:]
        for shard in shards
        for row in range(ROWS)
        if shard.trajectory.valid[:, row].any()
    }
    found = set()
    for _ in range(20):
        sample, _ = rig.sample(version=9)
        assert (sample.weight == 1).all()
        for device, s in np.ndindex(sample.age.shape):
            drawn = jax.tree.map(lambda x: x[device], sample.trajectory)  # noqa: B023
            number = float(drawn.observation["number"][0, s])
            index, trajectory, row = expected[number]
            assert sample.age[device, s] == 9 - index
            assert drawn.state["carry"][s] == trajectory.state["carry"][row]
            drawn, trajectory = drawn._replace(state=()), trajectory._replace(state=())
            jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:, s], b[:, row]), drawn, trajectory)  # noqa: B023
            found.add(number)
    assert found == expected.keys()


@DEVICES
def test_unrolls_are_drawn_by_priority_and_weighted_against_it(devices: int) -> None:
    settings = config(capacity=4 * devices * ROWS * T, prioritised=True, alpha=1.0, beta=0.5)
    rig, inserted = filled(Rig(devices, settings, ReplaySpec(unrolls=True)), 4)
    given: set[float] = set()
    while len(given) < np.sum(rig.held.entries):
        sample, place = rig.sample()
        first = sample.trajectory.observation["number"][:, 0]
        rig.reprioritise(place, priorities_of(first).astype(np.float32))
        given.update(first.flat)
    of_device = [
        [n for shards in inserted for n in shards[d].trajectory.observation["number"][0] if n in given]
        for d in rig.range
    ]
    probability: dict[float, float] = {}
    for numbers in of_device:
        powers = priorities_of(np.array(numbers))
        probability |= dict(zip(numbers, powers / powers.sum() / devices, strict=True))
    counts: Counter[float] = Counter()
    for _ in range(200):
        sample, _ = rig.sample()
        numbers = sample.trajectory.observation["number"][:, 0]
        counts.update(numbers.flat)
        weights = (len(probability) * np.vectorize(probability.__getitem__)(numbers)) ** -0.5
        np.testing.assert_allclose(sample.weight, weights / weights.max(), rtol=1e-3)
    observed = np.array([counts[number] for number in probability])
    expected = np.array(list(probability.values())) * counts.total()
    statistic = np.sum((observed - expected) ** 2 / np.maximum(expected, 1))
    assert stats.chi2.sf(statistic, len(expected) - 1) > 1e-3
    assert observed.max() > 3 * observed.min()


def test_rewards_are_clipped_one_by_one() -> None:
    rig, inserted = filled(Rig(1, config(), ReplaySpec(3, 0.9, reward_clip=0.2)), 3)
    clipped = [
        [s._replace(trajectory=s.trajectory._replace(reward=s.trajectory.reward.clip(-0.2, 0.2))) for s in shards]
        for shards in inserted
    ]
    expected = dict(pair for shards in clipped for shard in shards for pair in transitions(shard, ReplaySpec(3, 0.9)))
    for number, transition in drawn(rig, 20):
        assert transition.reward == pytest.approx(expected[number].reward, abs=1e-6)


def test_what_is_drawn_belongs_together_and_keeps_its_dtype() -> None:
    rig, inserted = filled(Rig(1, config(), ReplaySpec()), 6)
    actions = {
        number: action
        for (shard,) in inserted
        for number, action in zip(
            shard.trajectory.observation["number"][:-1].flat, shard.trajectory.action.flat, strict=True
        )
    }
    sample, _ = rig.sample(version=9)
    assert sample.observation["pixel"].dtype == np.uint8
    np.testing.assert_array_equal(sample.observation["pixel"][..., 0], sample.observation["number"] % 256)
    np.testing.assert_array_equal(sample.next_observation["pixel"][..., 0], sample.next_observation["number"] % 256)
    for number, action, age in zip(sample.observation["number"].flat, sample.action.flat, sample.age.flat, strict=True):
        assert action == actions[number]
        assert age == 9 - number // (4 * (T + 1) * ROWS)


def priorities_of(numbers: np.ndarray) -> np.ndarray:
    """Some priority for each step, known by its observation; from small to large."""
    return 0.01 + (numbers * 7919 % 101) ** 2 / 1000


def prioritised(rig: Rig) -> None:
    """Draw until every step has been given its priority."""
    given: set[float] = set()
    while len(given) < np.sum(rig.held.entries):
        sample, place = rig.sample()
        given.update(sample.observation["number"].flat)
        rig.reprioritise(place, priorities_of(sample.observation["number"]).astype(np.float32))


@MODES
@DEVICES
@pytest.mark.parametrize("alpha", [0.6, 1.0])
def test_steps_are_drawn_by_priority_and_weighted_against_it(devices: int, mode: str, alpha: float) -> None:
    beta = 0.5
    settings = config(capacity=3 * devices * ROWS * T, prioritised=True, alpha=alpha, beta=beta)
    rig, inserted = filled(Rig(devices, settings, ReplaySpec(), mode=mode), 5)
    prioritised(rig)
    probability: dict[float, float] = {}
    for device in rig.range:
        numbers = [n for shards in inserted[-3:] for n, _ in transitions(shards[device], ReplaySpec())]
        # Equation 1 of Schaul et al. 2016 on each device, all of which draw as many.
        powers = (priorities_of(np.array(numbers)) + 1e-6) ** alpha
        probability |= dict(zip(numbers, powers / powers.sum() / devices, strict=True))
    assert sum(probability.values()) == pytest.approx(1)

    counts: Counter[float] = Counter()
    for _ in range(300):
        sample, _ = rig.sample()
        numbers = sample.observation["number"]
        counts.update(numbers.flat)
        chances = np.vectorize(probability.__getitem__)(numbers)
        weights = (1 / len(probability) / chances) ** beta
        np.testing.assert_allclose(sample.weight, weights / weights.max(), rtol=1e-4)
    assert counts.keys() <= probability.keys()
    total = counts.total()
    observed = np.array([counts[number] for number in probability])
    expected = np.array(list(probability.values())) * total
    # Strata draw more evenly than chance would: only too large a distance is wrong.
    often = expected >= 5
    pooled = [*observed[often], observed[~often].sum()], [*expected[often], expected[~often].sum()]
    statistic = sum((o - e) ** 2 / e for o, e in zip(*pooled, strict=True) if e)
    assert stats.chi2.sf(statistic, len(pooled[0]) - 1) > 1e-3
    assert observed.max() > 3 * observed[often].min()


@DEVICES
def test_without_priorities_all_valid_steps_of_a_device_are_alike(devices: int) -> None:
    rig, inserted = filled(Rig(devices, config(batch_size=16), ReplaySpec()), 4)
    counts: Counter[float] = Counter()
    for _ in range(400):
        sample, _ = rig.sample()
        counts.update(sample.observation["number"].flat)
        assert (sample.weight == 1).all()
    for device in rig.range:
        numbers = [n for shards in inserted for n, _ in transitions(shards[device], ReplaySpec())]
        assert stats.chisquare([counts[number] for number in numbers]).pvalue > 1e-3


def test_importance_weights_rise_to_full_correction() -> None:
    settings = config(prioritised=True, beta=0.2, beta_learner_steps=100)
    rig, inserted = filled(Rig(1, settings, ReplaySpec()), 3)
    prioritised(rig)
    numbers = [n for (shard,) in inserted for n, _ in transitions(shard, ReplaySpec())]
    powers = dict(zip(numbers, (priorities_of(np.array(numbers)) + 1e-6) ** 0.6, strict=True))
    for version, beta in ((0, 0.2), (50, 0.6), (100, 1.0), (1000, 1.0)):
        sample, _ = rig.sample(version)
        inverse = np.array([1 / powers[n] for n in sample.observation["number"][0]]) ** beta
        np.testing.assert_allclose(sample.weight[0], inverse / inverse.max(), rtol=1e-4)


def test_new_steps_get_the_largest_priority_of_all_devices() -> None:
    rig, _ = filled(Rig(4, config(prioritised=True, alpha=1.0), ReplaySpec()), 1)
    _, place = rig.sample()
    priority = np.full(place.row.shape, 0.5, np.float32)
    priority[2, 0] = -7.0  # its absolute value counts
    rig.reprioritise(place, priority)
    rig.insert(*(random_shard(np.random.default_rng(1), T, ROWS, 0) for _ in rig.range))
    mass, steps = np.asarray(rig.held.mass), np.asarray(rig.held.entries)
    for device in rig.range:
        new = mass[device, :, 1]
        np.testing.assert_allclose(new[new > 0], 7.0, rtol=1e-5)
        np.testing.assert_array_equal((new > 0).sum(-1), steps[device, :, 1])


def test_priorities_that_are_not_finite_change_nothing() -> None:
    rig, _ = filled(Rig(1, config(prioritised=True), ReplaySpec()), 2)
    _, place = rig.sample()
    before = np.asarray(rig.held.mass)
    rig.reprioritise(place, np.full(place.row.shape, np.nan, np.float32))
    np.testing.assert_array_equal(before, rig.held.mass)


def test_sums_do_not_drift() -> None:
    rig, _ = filled(Rig(1, config(prioritised=True, alpha=1.0), ReplaySpec()), 4)
    rng = np.random.default_rng(0)
    for scale in (1e4, 1e-3):  # large first, then small: what a sum of differences forgets
        for _ in range(60):
            _, place = rig.sample()
            rig.reprioritise(place, (scale * rng.random(place.row.shape)).astype(np.float32))
    mass = np.asarray(rig.held.mass, np.float64).sum(-1)
    np.testing.assert_allclose(rig.held.unroll_mass, mass, rtol=1e-6)


@pytest.mark.parametrize("prioritised", [False, True])
def test_steps_of_too_old_a_policy_are_not_drawn(prioritised: bool) -> None:
    settings = config(capacity=4 * 2 * ROWS * T, max_lag=2, prioritised=prioritised)
    rig, inserted = filled(Rig(2, settings, ReplaySpec()), 4)
    young = {n for shards in inserted[2:] for shard in shards for n, _ in transitions(shard, ReplaySpec())}
    found = drawn(rig, 60, version=4)  # what was made by versions 2 and 3
    assert {number for number, _ in found} == young
    assert len(found) == 60 * 32
    sample, _ = rig.sample(version=9)
    assert (sample.weight == 0).all()


def test_nothing_is_drawn_where_nothing_is_valid() -> None:
    rig = Rig(1, config(prioritised=True), ReplaySpec())
    shard = random_shard(np.random.default_rng(0), T, ROWS, 0)
    nothing = shard.trajectory._replace(valid=np.zeros((T, ROWS), bool))
    rig.insert(shard._replace(trajectory=nothing))
    sample, place = rig.sample()
    assert (sample.weight == 0).all()
    assert np.isfinite(sample.reward).all()
    rig.reprioritise(place, np.ones(place.row.shape, np.float32))
    assert not np.asarray(rig.held.mass).any()


MEASURED = """
import gc, jax, numpy as np, psutil, sys
from replays import Rig, random_shard
from tianji_jax.agent import ReplaySpec
from tianji_jax.replay_config import ReplayConfig

devices, prioritised = int(sys.argv[1]), sys.argv[2] == "True"
config = ReplayConfig(capacity=1_500_000, batch_size=32, prioritised=prioritised)
resident = psutil.Process().memory_info
rig = Rig(devices, config, ReplaySpec(), steps=16, rows=64, held=False, pixels=100)
shards = [random_shard(np.random.default_rng(0), 16, 64, 0, pixels=100) for _ in rig.range]


def make():
    rig.held = jax.block_until_ready(rig.parallel.init_own(rig.replay.init))


def use():
    for _ in range(10):
        rig.insert(*shards)
        _, place = rig.sample()
        rig.reprioritise(place, np.ones(place.row.shape, np.float32))
    jax.block_until_ready(rig.held)


# Once before it counts: compiling takes megabytes that differ between machines.
make()
use()
rig.held = None
gc.collect()
before = resident().rss
make()
made = resident().rss - before
use()
used = resident().rss - before
print(rig.replay.nbytes * devices, sum(x.nbytes for x in jax.tree.leaves(rig.held)), made, used)
"""


@DEVICES
@pytest.mark.parametrize("prioritised", [False, True])
def test_it_takes_the_memory_that_was_announced(devices: int, prioritised: bool) -> None:
    # In a process of its own, where nothing else is allocated or freed.
    command = [sys.executable, "-c", MEASURED, str(devices), str(prioritised)]
    # Arrays are given back to the system when they are freed, not kept for later.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    here = Path(__file__).parent
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    announced, arrays, made, used = map(int, done.stdout.split())
    assert announced == arrays > 10**8
    assert made == pytest.approx(announced, rel=0.02)
    assert used == pytest.approx(announced, rel=0.02)


def test_a_replay_that_does_not_fit_is_refused_before_it_is_made() -> None:
    device = jax.devices()[0]
    free = psutil.virtual_memory().available
    rig = Rig(2, config(), ReplaySpec())
    step = rig.replay.nbytes * 2 / rig.replay.capacity
    large = type(rig.replay)(config(capacity=int(2 * free / step)), ReplaySpec(), rig.shard_spec, 2)
    with pytest.raises(ConfigError) as caught:
        large.check_memory(device)
    told = re.search(
        r"replay.capacity: .* on each of 2 devices, .* GiB are free: at most ([\d,]+) fit", str(caught.value)
    )
    assert told is not None
    most = int(told[1].replace(",", ""))
    assert most == pytest.approx(free / step, rel=0.1)
    type(rig.replay)(config(capacity=most // 2), ReplaySpec(), rig.shard_spec, 2).check_memory(device)


def test_what_cannot_be_divided_or_is_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"replay.batch_size: 30 .* 4 devices; make it a multiple of 4"):
        Rig(4, config(batch_size=30), ReplaySpec())
    with pytest.raises(ConfigError, match=r"7 steps do not fit into actors.unroll_length=6"):
        Rig(1, config(), ReplaySpec(n_step=7))


def test_capacity_is_a_whole_number_of_inserts() -> None:
    rig = Rig(1, config(capacity=5 * ROWS * T - 1), ReplaySpec())
    assert rig.replay.capacity == 4 * ROWS * T
    assert jnp.shape(rig.held.entries) == (1, ROWS, 4)
