"""SAC: losses, targets and steps against NumPy, its density against scipy, on one device and on several."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from controls import (
    RATE,
    SGD,
    S,
    critic_values,
    learn,
    make,
    policy_outputs,
    random_sample,
    scaled,
    some_state,
    with_head_bias,
)
from helpers import assert_close, random_observation
from scipy import integrate, stats

from tianji_jax.agents.sac import SAC, SACState
from tianji_jax.distributions import TanhGaussian
from tianji_jax.types import Sample

ALPHA = 0.3


class Repeatable(TanhGaussian):
    """Its noise depends on the row only, and so is the same wherever a row is."""

    def sample(self, parameters: jax.Array, rng: jax.Array) -> jax.Array:
        mean, log_std = jnp.split(parameters, 2, axis=-1)
        return mean + jnp.exp(log_std) * jax.lax.stop_gradient(jnp.sin(37.0 * mean))


@functools.cache
def repeatable(**settings: Any) -> SAC:
    agent: SAC = make(SAC, temperature=ALPHA, temperature_learning_rate=RATE, **{**SGD, **settings})
    agent.distribution = Repeatable((-1.0, -1.0), (1.0, 1.0))
    return agent


def state_of(agent: SAC) -> SACState:
    state: SACState = some_state(agent)
    return state._replace(log_temperature=np.float32(np.log(ALPHA)))


def drawn(policy: Any, observation: np.ndarray, noise: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Actions from -1 to 1 and their log-densities, by the change of variables written out."""
    mean, log_std = np.split(policy_outputs(policy, observation), 2, axis=-1)
    std = np.exp(np.clip(log_std, -5, 2))
    action = np.tanh(mean + std * (np.sin(37 * mean) if noise is None else noise))
    density = stats.norm(mean, std).pdf(np.arctanh(action)) / (1 - action**2)
    return action, np.log(density).sum(-1)


def soft_errors(state: SACState, sample: Sample) -> np.ndarray:
    """Of both critics, `[2, S]`."""
    action, log_prob = drawn(state.policy, sample.next_observation)
    after = [critic_values(state.target, which, sample.next_observation, action) for which in (0, 1)]
    target = sample.reward + sample.discount * (np.minimum(*after) - ALPHA * log_prob)
    taken = scaled(sample.action)
    return np.array([critic_values(state.critics, which, sample.observation, taken) - target for which in (0, 1)])


def policy_loss(policy: Any, critics: Any, sample: Sample, noise: np.ndarray) -> float:
    action, log_prob = drawn(policy, sample.observation, noise)
    values = [critic_values(critics, which, sample.observation, action) for which in (0, 1)]
    return float(np.mean(ALPHA * log_prob - np.minimum(*values)))


def noise_of(policy: Any, sample: Sample) -> np.ndarray:
    return np.sin(37 * policy_outputs(policy, sample.observation)[:, :2])


def test_losses_and_priorities_are_those_of_the_paper() -> None:
    agent = repeatable()
    state, sample = state_of(agent), random_sample(agent)
    after, metrics, priority = learn(agent, state, sample)
    errors = soft_errors(state, sample)
    np.testing.assert_allclose(priority, np.abs(errors).mean(0), rtol=1e-3)
    assert metrics["loss"] == pytest.approx(sum(sample.weight @ e**2 for e in errors) / (2 * S), rel=1e-3)
    # The policy climbs what the critics have become.
    expected = policy_loss(state.policy, after.critics, sample, noise_of(state.policy, sample))
    assert metrics["policy_loss"] == pytest.approx(expected, rel=1e-3)
    _, log_prob = drawn(state.policy, sample.observation)
    assert metrics["entropy"] == pytest.approx(-log_prob.mean(), rel=1e-3)
    assert metrics["temperature"] == pytest.approx(ALPHA)
    taken = scaled(sample.action)
    values = [critic_values(state.critics, which, sample.observation, taken) for which in (0, 1)]
    assert metrics["value_mean"] == pytest.approx(np.mean(values), rel=1e-3)


def test_one_step_of_sgd_follows_the_slopes_of_the_losses() -> None:
    agent = repeatable()
    state, sample = state_of(agent), random_sample(agent)
    after, metrics, _ = learn(agent, state, sample)
    noise, change = noise_of(state.policy, sample), 1e-4

    def by_policy(bias: np.ndarray) -> float:
        return policy_loss(with_head_bias(state.policy, bias), after.critics, sample, noise)

    def by_critics(bias: np.ndarray) -> float:
        errors = soft_errors(state._replace(critics=with_head_bias(state.critics, bias)), sample)
        return float(np.mean(sample.weight * (errors**2).sum(0)) / 2)

    for loss, old, new in (
        (by_policy, state.policy, after.policy),
        (by_critics, state.critics, after.critics),
    ):
        bias, moved = (np.asarray(x["params"]["head"]["bias"], np.float64) for x in (old, new))
        for index in np.ndindex(bias.shape):
            step = np.zeros_like(bias)
            step[index] = change
            slope = (loss(bias + step) - loss(bias - step)) / (2 * change)
            assert moved[index] - bias[index] == pytest.approx(-RATE * slope, rel=1e-2, abs=1e-5)

    # The temperature's loss is alpha (entropy - target), the target minus the number of entries.
    def by_temperature(log_alpha: float) -> float:
        return float(np.exp(log_alpha) * (metrics["entropy"] + 2))

    log_alpha = np.log(ALPHA)
    slope = (by_temperature(log_alpha + change) - by_temperature(log_alpha - change)) / (2 * change)
    assert after.log_temperature == pytest.approx(log_alpha - RATE * slope, rel=1e-3)
    expected = jax.tree.map(lambda old, new: old + 0.005 * (new - old), state.target, after.critics)
    assert_close(after.target, expected, rtol=1e-5, atol=1e-6)
    assert after.steps == 1


@pytest.mark.parametrize("mode", ["pmap", "shard_map"])
def test_two_devices_learn_what_one_does(mode: str) -> None:
    agent = repeatable()
    state, sample = state_of(agent), random_sample(agent)
    one, two = learn(agent, state, sample), learn(agent, state, sample, 2, mode)
    assert_close(two, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("log_std", "sign"), [(-3.0, 1), (0.0, -1)])
def test_the_temperature_rises_while_the_entropy_is_too_low(log_std: float, sign: int) -> None:
    agent = repeatable()
    state, sample = state_of(agent), random_sample(agent)
    # A policy that is the same everywhere, with an entropy of some -3.2 or 0.7; wanted is -2.
    policy = jax.tree.map(np.zeros_like, state.policy)
    policy = with_head_bias(policy, np.array([0.1, 0.1, log_std, log_std], np.float32))
    after, _, _ = learn(agent, state._replace(policy=policy), sample)
    assert np.sign(after.log_temperature - np.log(ALPHA)) == sign


def test_the_temperature_may_stay_and_each_part_has_its_own_learning_rate() -> None:
    agent = repeatable(critic_learning_rate=1e-12, learn_temperature=False)
    state, sample = state_of(agent), random_sample(agent)
    after, _, _ = learn(agent, state, sample)
    assert_close(after.critics, state.critics, rtol=1e-6, atol=1e-6)
    assert after.log_temperature == state.log_temperature
    bias = [np.asarray(s.policy["params"]["head"]["bias"]) for s in (state, after)]
    assert np.abs(bias[1] - bias[0]).max() > 1e-3


def test_the_density_is_that_of_what_is_sampled() -> None:
    agent = make(SAC)
    state = state_of(agent)
    row = random_observation(agent.env_spec.observation, (1,), np.random.default_rng(1))
    action, log_prob = jax.jit(agent.sample)(state.policy, np.tile(row, (20_000, 1)), jax.random.key(0))
    mean, log_std = np.split(policy_outputs(state.policy, row)[0], 2)
    densities = []
    for i in range(2):
        before = stats.norm(mean[i], np.exp(log_std[i]))

        def density(a: float, before: Any = before) -> float:
            return float(before.pdf(np.arctanh(a)) / (1 - a**2))

        assert integrate.quad(density, -1, 1)[0] == pytest.approx(1, abs=1e-6)
        densities.append(np.vectorize(density)(np.asarray(action[:, i], np.float64)))
        share = integrate.quad(density, -1, 0.2)[0]
        assert np.mean(action[:, i] < 0.2) == pytest.approx(share, abs=0.015)
    inside = np.abs(action).max(-1) < 0.999  # nearer to the edge float32 actions tell little of what they were
    assert inside.mean() > 0.5
    np.testing.assert_allclose(log_prob[inside], np.log(densities[0] * densities[1])[inside], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("bias", [-200.0, 30.0, 200.0])
def test_nothing_overflows_at_the_edges(bias: float) -> None:
    agent = repeatable()
    state, sample = state_of(agent), random_sample(agent)
    policy = with_head_bias(state.policy, np.array([bias, -bias, bias, bias], np.float32))
    after = learn(agent, state._replace(policy=policy), sample)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))


def test_greedy_actions_are_the_squashed_means() -> None:
    agent = make(SAC)
    state = state_of(agent)
    observation = random_observation(agent.env_spec.observation, (S,), np.random.default_rng(0))
    action, _ = agent.act_greedy(agent.actor_params(state), observation, np.zeros(S, bool), ())
    expected = np.tanh(policy_outputs(state.policy, observation)[:, :2])
    np.testing.assert_allclose(scaled(np.asarray(action)), expected, rtol=1e-4, atol=1e-5)
