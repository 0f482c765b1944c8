import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tianji_jax.returns import Steps, gae, n_step_returns, vtrace

SHAPE = T, B = 7, 3
SEEDS = st.integers(0, 2**31 - 1)
DISCOUNTS = st.sampled_from([0.0, 0.5, 0.99, 1.0])
LAMBDAS = st.sampled_from([0.0, 0.6, 0.95, 1.0])

jitted_vtrace = jax.jit(vtrace)
jitted_gae = jax.jit(gae)


def random_steps(seed: int) -> tuple[Steps, np.ndarray]:
    """Steps of random episodes (ends of both kinds, followed by a reset step or not) and log importance weights."""
    rng = np.random.default_rng(seed)
    terminated = rng.random(SHAPE) < 0.2
    truncated = rng.random(SHAPE) < 0.2
    valid = np.ones(SHAPE, bool)
    ended = (terminated | truncated)[:-1]
    valid[1:] = ~ended | (rng.random(ended.shape) < 0.2)
    valid &= rng.random(SHAPE) > 0.1
    value = rng.normal(size=(T + 1, B)).astype(np.float32)
    reward = rng.normal(size=SHAPE).astype(np.float32)
    log_weight = rng.normal(size=SHAPE).astype(np.float32)
    return Steps(value, reward, terminated, truncated, valid), log_weight


def oracle(steps, log_weight, discount, trace_lambda, rho_bar, c_bar):
    """V-trace as the sum of equation 1, one environment and one start at a time, with no recursion."""
    value, reward, terminated, truncated, valid = steps
    weight = np.exp(log_weight.astype(float))
    excess = np.zeros((T + 1, B))
    for b in range(B):
        for s in range(T):
            coefficient = 1.0
            for t in range(s, T):
                if not valid[t, b]:
                    break
                following = 0.0 if terminated[t, b] else discount * value[t + 1, b]
                error = reward[t, b] + following - value[t, b]
                excess[s, b] += coefficient * min(rho_bar, weight[t, b]) * error
                if terminated[t, b] or truncated[t, b]:
                    break
                coefficient *= discount * trace_lambda * min(c_bar, weight[t, b])
    target = value + excess
    advantage = np.zeros(SHAPE)
    for t, b in zip(*np.nonzero(valid), strict=True):
        if terminated[t, b]:
            bootstrap = 0.0
        elif truncated[t, b]:
            bootstrap = value[t + 1, b]
        else:
            bootstrap = trace_lambda * target[t + 1, b] + (1 - trace_lambda) * value[t + 1, b]
        advantage[t, b] = reward[t, b] + discount * bootstrap - value[t, b]
    return target[:-1], advantage


@settings(deadline=None, max_examples=100)
@given(SEEDS, DISCOUNTS, LAMBDAS, st.sampled_from([(1.0, 1.0), (2.0, 1.0), (0.5, 3.0)]))
def test_vtrace_is_the_paper_s_sum(seed, discount, trace_lambda, bars):
    steps, log_weight = random_steps(seed)
    trace = jitted_vtrace(steps, log_weight, discount, trace_lambda, *bars)
    target, advantage = oracle(steps, log_weight, discount, trace_lambda, *bars)
    np.testing.assert_allclose(trace.target, target, atol=1e-4)
    np.testing.assert_allclose(trace.advantage, advantage, atol=1e-4)
    np.testing.assert_allclose(trace.rho, np.where(steps.valid, np.clip(np.exp(log_weight), 0, bars[0]), 0), rtol=1e-6)


@settings(deadline=None, max_examples=100)
@given(SEEDS, DISCOUNTS, LAMBDAS)
def test_vtrace_with_weights_of_one_is_gae(seed, discount, trace_lambda):
    steps, _ = random_steps(seed)
    trace = jitted_vtrace(steps, jnp.zeros(SHAPE), discount, trace_lambda)
    estimate = jitted_gae(steps, discount, trace_lambda)
    np.testing.assert_allclose(trace.advantage, estimate.advantage, atol=1e-5)
    np.testing.assert_allclose(trace.target, estimate.target, atol=1e-5)
    np.testing.assert_allclose(trace.target, estimate.advantage + steps.value[:-1], atol=1e-5)


@settings(deadline=None, max_examples=50)
@given(SEEDS, LAMBDAS)
def test_nothing_flows_through_an_invalid_step(seed, trace_lambda):
    """Whatever is beyond a reset step, and whatever the reset step itself holds, changes nothing before it."""
    steps, log_weight = random_steps(seed)
    cut = 3
    steps.valid[cut] = False
    reward, value, other = steps.reward.copy(), steps.value.copy(), log_weight.copy()
    reward[cut:], value[cut + 1 :], other[cut] = 1e3, -1e3, 1e3
    changed = steps._replace(reward=reward, value=value)
    before = jitted_vtrace(steps, log_weight, 0.9, trace_lambda)
    after = jitted_vtrace(changed, other, 0.9, trace_lambda)
    np.testing.assert_array_equal(before.advantage[:cut], after.advantage[:cut])
    np.testing.assert_array_equal(before.target[: cut + 1], after.target[: cut + 1])
    assert np.isfinite(after.target[:cut]).all()


def test_rlax_agrees_where_episodes_do_not_end():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports, which use what JAX is about to remove
        import rlax
    steps, log_weight = random_steps(0)
    never = np.zeros(SHAPE, bool)
    steps = steps._replace(terminated=never, truncated=never, valid=~never)
    trace = vtrace(steps, log_weight, 0.9, 0.8, 1.0, 1.0)
    estimate = gae(steps, 0.9, 0.8)
    value, discount = jnp.asarray(steps.value), jnp.full(T, 0.9)
    for b in range(B):
        weight = jnp.exp(log_weight[:, b])
        error = rlax.vtrace(value[:-1, b], value[1:, b], jnp.asarray(steps.reward[:, b]), discount, weight, lambda_=0.8)
        np.testing.assert_allclose(trace.target[:, b], error + value[:-1, b], rtol=1e-4, atol=1e-5)
        expected = rlax.truncated_generalized_advantage_estimation(
            jnp.asarray(steps.reward[:, b]), discount, 0.8, value[:, b]
        )
        np.testing.assert_allclose(estimate.advantage[:, b], expected, rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=50)
@given(SEEDS, st.integers(1, T + 2), DISCOUNTS)
def test_n_step_returns_sum_rewards_one_by_one(seed, n, discount):
    steps, _ = random_steps(seed)
    value, reward, terminated, truncated, valid = steps
    expected = np.zeros(SHAPE)
    for b in range(B):
        for s in range(T):
            factor, t = 1.0, s
            while t < min(s + n, T) and valid[t, b]:
                expected[s, b] += factor * reward[t, b]
                factor *= discount
                t += 1
                if terminated[t - 1, b] or truncated[t - 1, b]:
                    break
            if t == s or not terminated[t - 1, b]:
                expected[s, b] += factor * value[t, b]
    np.testing.assert_allclose(n_step_returns(steps, discount, n), expected, atol=1e-4)


def test_n_step_returns_reach_to_the_unroll_s_end_as_gae_does():
    steps, _ = random_steps(3)
    np.testing.assert_allclose(n_step_returns(steps, 0.9, T), gae(steps, 0.9, 1.0).target, atol=1e-5)


def test_n_step_returns_refuse_no_steps():
    with pytest.raises(ValueError, match="at least 1, not 0"):
        n_step_returns(random_steps(0)[0], 0.9, 0)


def test_an_invalid_step_with_a_huge_ratio_leaves_finite_gradients():
    steps, log_weight = random_steps(1)
    steps.valid[2] = False
    log_weight[2] = 89.0 + 100.0

    def loss(value, log_weight):
        trace = vtrace(steps._replace(value=value), log_weight, 0.9)
        return jnp.sum((value[:-1] - trace.target) ** 2) + jnp.sum(log_weight * trace.rho * trace.advantage)

    gradients = jax.grad(loss, argnums=(0, 1))(jnp.asarray(steps.value), jnp.asarray(log_weight))
    assert all(np.isfinite(g).all() for g in gradients)
    assert np.all(gradients[1][2] == 0)


def test_returns_carry_no_gradient():
    steps, log_weight = random_steps(2)

    def total(value, log_weight):
        s = steps._replace(value=value)
        outputs = (vtrace(s, log_weight, 0.9), gae(s, 0.9, 0.9), n_step_returns(s, 0.9, 2))
        return sum(jnp.sum(x) for x in jax.tree.leaves(outputs))

    gradients = jax.grad(total, argnums=(0, 1))(jnp.asarray(steps.value), jnp.asarray(log_weight))
    assert all(np.all(g == 0) for g in gradients)


def test_termination_wins_over_truncation():
    ended = np.ones((1, 1), bool)
    steps = Steps(np.array([[1.0], [50.0]], np.float32), np.ones((1, 1), np.float32), ended, ended, ended)
    assert float(gae(steps, 0.9, 0.9).target[0, 0]) == 1.0
    assert float(vtrace(steps, jnp.zeros((1, 1)), 0.9).target[0, 0]) == 1.0
    assert float(n_step_returns(steps, 0.9, 1)[0, 0]) == 1.0
