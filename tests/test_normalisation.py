import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tianji_jax import normalisation
from tianji_jax.normalisation import RunningStatistics

SHAPE = T, B = 8, 4


def batches(count: int, offset: float = 0.0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        ((offset + (i + 1) * rng.normal(size=(*SHAPE, 3))).astype(np.float32), rng.random(SHAPE) < 0.7)
        for i in range(count)
    ]


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_statistics_are_those_of_all_valid_samples(offset):
    statistics = normalisation.initial_statistics((3,))
    for x, valid in batches(5, offset):
        statistics = normalisation.update_statistics(statistics, np.where(valid[..., None], x, np.nan), valid)
    everything = np.concatenate([x[valid] for x, valid in batches(5, offset)]).astype(float)
    assert int(statistics.num_samples) == len(everything)
    np.testing.assert_allclose(statistics.mean, everything.mean(axis=0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(statistics.variance, everything.var(axis=0), rtol=1e-3)
    scaled = normalisation.normalise(statistics, everything)
    np.testing.assert_allclose(scaled.std(axis=0), 1.0, atol=2e-2)


@pytest.mark.parametrize("devices", [2, 4])
def test_devices_merge_to_what_one_device_finds(devices):
    update = jax.pmap(
        lambda s, x, valid: normalisation.update_statistics(s, x, valid, "data"),
        axis_name="data",
        in_axes=(None, 0, 0),
        out_axes=None,
        devices=jax.devices()[:devices],
    )
    alone = together = normalisation.initial_statistics((3,))
    for x, valid in batches(3):
        valid[:, 0] = False  # a device without a single valid sample
        alone = normalisation.update_statistics(alone, x, valid)
        shards = [np.stack(np.split(a, devices, axis=1)) for a in (x, valid)]
        together = jax.device_get(update(together, *shards))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), alone, together)


def test_a_batch_without_valid_samples_changes_nothing():
    x, valid = batches(1)[0]
    before = normalisation.update_statistics(normalisation.initial_statistics((3,)), x, valid)
    after = normalisation.update_statistics(before, 1e6 * x, np.zeros_like(valid))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_the_count_stops_at_its_largest_value_and_learning_goes_on():
    most = 2**31 - 1
    old = RunningStatistics(jnp.int32(most - 5), jnp.zeros(()), jnp.ones(()))
    new = normalisation.update_statistics(old, np.full(SHAPE, 1e6, np.float32), np.ones(SHAPE, bool))
    assert int(new.num_samples) == most
    np.testing.assert_allclose(new.mean, 1e6 * T * B / most, rtol=1e-3)


def test_statistics_of_nothing_only_clip():
    x = np.array([-30.0, 0.5, 30.0], np.float32)
    scaled = normalisation.normalise(normalisation.initial_statistics((3,)), x)
    np.testing.assert_allclose(scaled, [-10.0, 0.5, 10.0], rtol=1e-6)


def test_reward_scale_is_the_root_mean_square_of_the_valid_returns():
    scale = normalisation.initial_reward_scale()
    assert float(scale.scale) == 1.0
    seen = []
    for x, valid in batches(3, 50.0):
        scale = normalisation.update_reward_scale(scale, x[..., 0], valid)
        seen.extend(x[..., 0][valid].tolist())
    assert float(scale.scale) == pytest.approx(np.sqrt(np.mean(np.square(seen))), rel=1e-4)


def test_reward_scale_stays_one_while_there_are_no_rewards():
    scale = normalisation.update_reward_scale(
        normalisation.initial_reward_scale(), np.zeros(SHAPE, np.float32), np.ones(SHAPE, bool)
    )
    assert float(scale.scale) == 1.0
