import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tianji_jax import losses

SHAPE = T, B = 6, 4


def random_arrays(seed: int, count: int) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).normal(size=(count, *SHAPE)).astype(np.float32))


def weights(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    valid = np.random.default_rng(seed).random(SHAPE) < 0.7
    return valid, (valid / valid.mean()).astype(np.float32)


def on_devices(function, devices: int, *arrays):
    """`function` of arrays split by environment over `devices`, its result on the first."""
    shards = [np.stack(np.split(x, devices, axis=1)) for x in arrays]
    return jax.pmap(lambda *x: function(*x, "data"), axis_name="data", devices=jax.devices()[:devices])(*shards)


def test_losses_are_means_over_valid_steps():
    log_weight, advantage, value, old, target = random_arrays(1, 5)
    valid, weight = weights()
    ratio = np.exp(log_weight[valid].astype(float))
    clipped = np.where(ratio > 1.2, 1.2, np.where(ratio < 0.8, 0.8, ratio))
    surrogate = np.where(
        ratio * advantage[valid] < clipped * advantage[valid], ratio * advantage[valid], clipped * advantage[valid]
    )
    assert losses.clipped_surrogate_loss(log_weight, advantage, 0.2, weight) == pytest.approx(
        -surrogate.mean(), rel=1e-4
    )
    assert losses.policy_gradient_loss(log_weight, advantage, weight) == pytest.approx(
        -np.mean([x * a for x, a in zip(log_weight[valid], advantage[valid], strict=True)]), rel=1e-4
    )
    errors = (value[valid] - target[valid]) ** 2
    assert losses.value_loss(value, target, weight) == pytest.approx(errors.mean() / 2, rel=1e-4)
    near = np.minimum(np.maximum(value[valid], old[valid] - 0.3), old[valid] + 0.3)
    worse = np.maximum(errors, (near - target[valid]) ** 2)
    assert losses.clipped_value_loss(value, old, target, 0.3, weight) == pytest.approx(worse.mean() / 2, rel=1e-4)
    assert losses.entropy_loss(value, weight) == pytest.approx(-value[valid].mean(), rel=1e-4)
    assert losses.mean_importance_weight(log_weight, weight) == pytest.approx(ratio.mean(), rel=1e-4)
    outside = np.count_nonzero((ratio > 1.2) | (ratio < 0.8)) / ratio.size
    assert losses.clip_fraction(log_weight, weight, 1.2, 0.8) == pytest.approx(outside, rel=1e-4)
    assert losses.kl_divergence(log_weight, weight) == pytest.approx(np.mean(ratio - 1 - np.log(ratio)), rel=1e-4)


def test_clipping_takes_the_gradient_of_a_ratio_that_went_far_enough():
    weight = np.ones((1, 4), np.float32)
    log_weight = jnp.log(jnp.array([[1.5, 1.5, 0.5, 0.5]]))
    advantage = np.array([[1.0, -1.0, 1.0, -1.0]], np.float32)
    gradient = jax.grad(losses.clipped_surrogate_loss)(log_weight, advantage, 0.2, weight)
    np.testing.assert_allclose(gradient, [[0.0, 1.5 / 4, -0.5 / 4, 0.0]], rtol=1e-5)


@pytest.mark.parametrize("poison", [1e30, np.inf, np.nan, -1e9])
def test_masked_rows_change_neither_losses_nor_gradients(poison):
    log_prob, behaviour, advantage, value, target = random_arrays(2, 5)
    valid, weight = weights()

    def loss(log_prob, value, behaviour, target):
        log_weight = losses.log_importance_weight(log_prob, behaviour, weight)
        return (
            losses.clipped_surrogate_loss(log_weight, advantage, 0.2, weight)
            + losses.policy_gradient_loss(log_prob, advantage, weight)
            + losses.value_loss(value, target, weight)
            + losses.kl_divergence(log_weight, weight)
        )

    def poisoned(x):
        return np.where(valid, x, poison).astype(np.float32)

    clean = jax.value_and_grad(loss, argnums=(0, 1))(log_prob, value, behaviour, target)
    dirty = jax.value_and_grad(loss, argnums=(0, 1))(log_prob, value, poisoned(behaviour), poisoned(target))
    np.testing.assert_array_equal(clean[0], dirty[0])
    for a, b in zip(clean[1], dirty[1], strict=True):
        np.testing.assert_array_equal(np.where(valid, b, 0), a)
        assert np.isfinite(b).all() or not np.isfinite(poison)


def test_a_masked_row_with_a_log_ratio_of_89_leaves_a_finite_gradient():
    weight = np.array([[1.0, 0.0]], np.float32)

    def loss(log_prob):
        log_weight = losses.log_importance_weight(log_prob, jnp.zeros((1, 2)), weight)
        return losses.clipped_surrogate_loss(log_weight, -jnp.ones((1, 2)), 0.2, weight)

    gradient = jax.grad(loss)(jnp.array([[0.1, 89.0]]))
    assert np.isfinite(gradient).all()
    assert gradient[0, 1] == 0
    assert gradient[0, 0] != 0


def test_effective_sample_size_counts_equal_weights_fully_and_a_single_large_one_once():
    _, weight = weights()
    valid = int(np.count_nonzero(weight))
    assert losses.effective_sample_size(np.full(SHAPE, 3.0, np.float32), weight) == pytest.approx(1.0)
    one = np.full(SHAPE, -20.0, np.float32)
    one[np.unravel_index(np.flatnonzero(weight)[0], SHAPE)] = 20.0
    assert losses.effective_sample_size(one, weight) == pytest.approx(1 / valid, rel=1e-4)


def test_explained_variance_is_one_for_the_target_and_zero_for_a_constant():
    target, other = random_arrays(3, 2)
    _, weight = weights()
    assert losses.explained_variance(target, target, weight) == pytest.approx(1.0)
    assert losses.explained_variance(np.zeros(SHAPE, np.float32), target, weight) == pytest.approx(0.0, abs=1e-5)
    assert losses.explained_variance(other, np.ones(SHAPE, np.float32), weight) == 0.0


@pytest.mark.parametrize("devices", [2, 4])
def test_what_is_not_linear_is_taken_over_all_devices(devices):
    x, y = random_arrays(4, 2)
    x += 10 * np.arange(B, dtype=np.float32)  # shards that differ: per-shard statistics would be wrong
    valid, weight = weights()
    together = on_devices(losses.normalise, devices, x, weight)
    together = np.concatenate(list(together), axis=1)
    np.testing.assert_allclose(together[valid], (x[valid] - x[valid].mean()) / x[valid].std(), rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(together[~valid], 0)
    for function, arrays in (
        (losses.effective_sample_size, (y, weight)),
        (losses.explained_variance, (y, x, weight)),
    ):
        np.testing.assert_allclose(on_devices(function, devices, *arrays), function(*arrays), rtol=1e-4)


def test_moments_of_a_minibatch_with_few_valid_steps_are_its_own():
    x = random_arrays(5, 1)[0]
    valid = np.zeros(SHAPE, bool)
    valid[0] = True
    mean, variance = losses.weighted_moments(x, 1.3 * valid.astype(np.float32))
    assert float(mean) == pytest.approx(x[0].mean(), rel=1e-4)
    assert float(variance) == pytest.approx(x[0].var(), rel=1e-4)
