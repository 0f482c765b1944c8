import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from tianji_jax.distributions import distribution, mask_logits
from tianji_jax.types import ContinuousActions, DiscreteActions, MultiDiscreteActions

LOW, HIGH = (-1.0, 0.0), (1.0, 10.0)


def frequencies(samples, n):
    return np.bincount(np.asarray(samples).ravel(), minlength=n) / np.asarray(samples).size


def test_categorical_samples_as_often_as_its_log_prob_says():
    family = distribution(DiscreteActions(3))
    assert (family.num_parameters, family.num_shared_parameters) == (3, 0)
    logits = jnp.array([0.3, -1.0, 1.2])
    probabilities = np.exp(np.array([0.3, -1.0, 1.2]))
    probabilities /= probabilities.sum()
    samples = family.sample(jnp.broadcast_to(logits, (20000, 3)), jax.random.key(0))
    assert samples.dtype == jnp.int32
    np.testing.assert_allclose(frequencies(samples, 3), probabilities, atol=0.02)
    log_probs = family.log_prob(jnp.broadcast_to(logits, (3, 3)), jnp.arange(3))
    np.testing.assert_allclose(log_probs, np.log(probabilities), rtol=1e-5)
    np.testing.assert_allclose(family.entropy(logits), stats.entropy(probabilities), rtol=1e-5)
    assert int(family.mode(logits)) == 2


def test_multi_categorical_is_the_product_of_its_choices():
    family = distribution(MultiDiscreteActions((2, 3)))
    assert family.num_parameters == 5
    logits = jax.random.normal(jax.random.key(1), (4, 6, 5))
    raw = family.sample(logits, jax.random.key(2))
    assert raw.shape == (4, 6, 2)
    assert raw.dtype == jnp.int32
    first, second = distribution(DiscreteActions(2)), distribution(DiscreteActions(3))
    expected = first.log_prob(logits[..., :2], raw[..., 0]) + second.log_prob(logits[..., 2:], raw[..., 1])
    np.testing.assert_allclose(family.log_prob(logits, raw), expected, rtol=1e-5)
    expected = first.entropy(logits[..., :2]) + second.entropy(logits[..., 2:])
    np.testing.assert_allclose(family.entropy(logits), expected, rtol=1e-5)
    many = family.sample(jnp.broadcast_to(logits[0, 0], (20000, 5)), jax.random.key(3))
    np.testing.assert_allclose(frequencies(many[:, 1], 3), jax.nn.softmax(logits[0, 0, 2:]), atol=0.02)
    np.testing.assert_array_equal(family.mode(logits)[..., 1], np.argmax(logits[..., 2:], axis=-1))


@pytest.mark.parametrize("spec", [DiscreteActions(5), MultiDiscreteActions((2, 3))])
def test_forbidden_actions_have_no_probability_and_no_gradient(spec):
    family = distribution(spec)
    allowed = np.array([1, 0, 1, 1, 0])
    logits = jnp.array([0.1, 80.0, 0.4, -0.2, 90.0])
    samples = family.sample(mask_logits(jnp.broadcast_to(logits, (5000, 5)), allowed), jax.random.key(0))
    offsets = np.array([0, 2]) if samples.ndim == 2 else 0
    assert set(np.unique(samples + offsets)) == {0, 2, 3}

    def objective(logits):
        masked = mask_logits(logits, allowed)
        return family.log_prob(masked, samples[0]) + family.entropy(masked), masked

    gradient, masked = jax.grad(objective, has_aux=True)(logits)
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[allowed == 0], 0)
    assert np.any(gradient != 0)
    if isinstance(spec, DiscreteActions):
        np.testing.assert_array_equal(jax.nn.softmax(masked)[allowed == 0], 0.0)
        among = distribution(DiscreteActions(3)).entropy(logits[allowed != 0])
    else:
        among = distribution(DiscreteActions(2)).entropy(logits[2:4])
    np.testing.assert_allclose(family.entropy(masked), among, rtol=1e-5)


def test_where_nothing_is_allowed_all_is_equally_likely():
    family = distribution(DiscreteActions(4))
    masked = mask_logits(jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.zeros(4, bool))
    np.testing.assert_allclose(family.log_prob(masked, jnp.array(1)), np.log(0.25), rtol=1e-6)
    np.testing.assert_allclose(family.entropy(masked), np.log(4), rtol=1e-6)


def test_gaussian_density_is_of_the_unclipped_sample():
    family = distribution(ContinuousActions(LOW, HIGH))
    assert (family.num_parameters, family.num_shared_parameters) == (2, 2)
    parameters = jnp.array([0.9, 9.0, np.log(0.5), np.log(3.0)], jnp.float32)
    raw = family.sample(jnp.broadcast_to(parameters, (20000, 4)), jax.random.key(0))
    action = family.to_action(raw)
    assert np.all(action >= np.array(LOW))
    assert np.all(action <= np.array(HIGH))
    assert np.any(raw > np.array(HIGH))
    expected = stats.norm([0.9, 9.0], [0.5, 3.0])
    log_prob = family.log_prob(jnp.broadcast_to(parameters, (20000, 4)), raw)
    np.testing.assert_allclose(log_prob, expected.logpdf(raw).sum(axis=-1), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(family.entropy(parameters), expected.entropy().sum(), rtol=1e-5)
    np.testing.assert_allclose(raw.mean(axis=0), [0.9, 9.0], atol=0.1)
    np.testing.assert_allclose(family.mode(parameters), [0.9, 9.0])


def test_tanh_gaussian_density_integrates_to_one_over_the_bounds():
    family = distribution(ContinuousActions((2.0,), (6.0,)), squash=True)
    parameters = jnp.array([0.4, np.log(0.7)], jnp.float32)

    grid = np.linspace(2.0, 6.0, 20_001)[1:-1]
    raw = np.arctanh((grid - 4.0) / 2.0)[:, None].astype(np.float32)
    densities = np.exp(family.log_prob(jnp.broadcast_to(parameters, (len(grid), 2)), raw))
    assert integrate.trapezoid(densities, grid) == pytest.approx(1.0, abs=1e-3)
    entropy = integrate.trapezoid(-densities * np.log(densities), grid)
    assert float(family.entropy(parameters)) == pytest.approx(entropy, abs=2e-3)


@pytest.mark.parametrize("std", [0.1, 1.0, 2.0])
def test_tanh_gaussian_entropy_is_the_mean_of_its_log_prob(std):
    family = distribution(ContinuousActions(LOW, HIGH), squash=True)
    parameters = jnp.array([0.5, -2.0, np.log(std), np.log(std)], jnp.float32)
    many = jnp.broadcast_to(parameters, (100_000, 4))
    log_prob = family.log_prob(many, family.sample(many, jax.random.key(0)))
    assert float(family.entropy(parameters)) == pytest.approx(float(-log_prob.mean()), abs=0.03)


def test_tanh_gaussian_is_finite_and_within_bounds_far_out():
    family = distribution(ContinuousActions(LOW, HIGH), squash=True)
    parameters, raw = jnp.array([30.0, -30.0, 0.0, 0.0]), jnp.array([50.0, -50.0])
    gradient = jax.grad(family.log_prob)(parameters, raw)
    assert np.isfinite(family.log_prob(parameters, raw))
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(family.to_action(raw), [1.0, 0.0])


@pytest.mark.parametrize("spec", [DiscreteActions(3), ContinuousActions((-np.inf,), (np.inf,))])
def test_squash_needs_bounded_continuous_actions(spec):
    with pytest.raises(ValueError, match="squash"):
        distribution(spec, squash=True)
