"""TD3 and DDPG: losses, targets and steps against NumPy, each addition alone, on one device and on several."""

import functools
import itertools
from typing import Any

import jax
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

from tianji_jax.agents.td3 import DDPG, TD3, TD3State
from tianji_jax.types import Sample


@functools.cache
def made_of(agent: type[TD3], **settings: Any) -> Any:
    return make(agent, **{**SGD, **settings})


def critics_of(agent: TD3) -> range:
    return range(2 if agent.config.twin else 1)


def errors_of(agent: TD3, state: TD3State, sample: Sample, noise: Any = 0.0) -> np.ndarray:
    """Of each critic, `[C, S]`."""
    action = np.clip(np.tanh(policy_outputs(state.policy_target, sample.next_observation)) + noise, -1, 1)
    after = [critic_values(state.critics_target, which, sample.next_observation, action) for which in critics_of(agent)]
    target = sample.reward + sample.discount * np.array(after).min(0)
    taken = scaled(sample.action)
    return np.array([critic_values(state.critics, w, sample.observation, taken) - target for w in critics_of(agent)])


def policy_loss(policy: Any, critics: Any, sample: Sample) -> float:
    action = np.tanh(policy_outputs(policy, sample.observation))
    return -float(critic_values(critics, 0, sample.observation, action).mean())


@pytest.mark.parametrize("agent", [TD3, DDPG])
def test_losses_and_priorities_are_those_of_the_papers(agent: type[TD3]) -> None:
    made = made_of(agent, target_noise=0.0, policy_delay=1)
    state, sample = some_state(made), random_sample(made)
    after, metrics, priority = learn(made, state, sample)
    errors = errors_of(made, state, sample)
    assert len(errors) == (2 if agent is TD3 else 1)
    np.testing.assert_allclose(priority, np.abs(errors).mean(0), rtol=1e-3)
    assert metrics["loss"] == pytest.approx(sum(sample.weight @ e**2 for e in errors) / (2 * S), rel=1e-3)
    assert metrics["policy_loss"] == pytest.approx(policy_loss(state.policy, after.critics, sample), rel=1e-3)
    assert metrics["policy_gradient_norm"] > 0


@pytest.mark.parametrize("agent", [TD3, DDPG])
def test_one_step_of_sgd_follows_the_slopes_of_the_losses(agent: type[TD3]) -> None:
    made = made_of(agent, target_noise=0.0, policy_delay=1)
    state, sample = some_state(made), random_sample(made)
    after, _, _ = learn(made, state, sample)

    def by_policy(bias: np.ndarray) -> float:
        return policy_loss(with_head_bias(state.policy, bias), after.critics, sample)

    def by_critics(bias: np.ndarray) -> float:
        errors = errors_of(made, state._replace(critics=with_head_bias(state.critics, bias)), sample)
        return float(np.mean(sample.weight * (errors**2).sum(0)) / 2)

    for loss, old, new in ((by_policy, state.policy, after.policy), (by_critics, state.critics, after.critics)):
        bias, moved = (np.asarray(x["params"]["head"]["bias"], np.float64) for x in (old, new))
        for index in np.ndindex(bias.shape):
            step = np.zeros_like(bias)
            step[index] = 1e-4
            slope = (loss(bias + step) - loss(bias - step)) / 2e-4
            assert moved[index] - bias[index] == pytest.approx(-RATE * slope, rel=1e-2, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["pmap", "shard_map"])
@pytest.mark.parametrize("before", [0, 1])
def test_two_devices_learn_what_one_does(mode: str, before: int) -> None:
    made = made_of(TD3, target_noise=0.0)
    state, sample = some_state(made)._replace(steps=np.int32(before)), random_sample(made)
    one, two = learn(made, state, sample), learn(made, state, sample, 2, mode)
    assert_close(two, one, rtol=1e-4, atol=1e-5)


def test_policy_and_targets_wait_for_the_critics() -> None:
    made = make(TD3, policy_delay=3, target_rate=0.25, **SGD)
    state, losses = some_state(made), []
    for step in range(1, 7):
        before = state
        state, metrics, _ = learn(made, state, random_sample(made, step))
        losses.append(metrics["policy_loss"])
        assert state.steps == step
        expected_policy, expected_critics = (
            jax.tree.map(lambda old, new: old + 0.25 * (new - old), target, network) if step % 3 == 0 else target
            for target, network in (
                (before.policy_target, state.policy),
                (before.critics_target, state.critics),
            )
        )
        assert_close(state.policy_target, expected_policy, rtol=1e-5, atol=1e-6)
        assert_close(state.critics_target, expected_critics, rtol=1e-5, atol=1e-6)
        moved = not np.array_equal(before.policy["params"]["head"]["bias"], state.policy["params"]["head"]["bias"])
        assert moved == (step % 3 == 0)
        assert not np.array_equal(before.critics["params"]["head"]["bias"], state.critics["params"]["head"]["bias"])
    # Between its steps the loss that is told is that of the last one.
    assert losses[0] == losses[1] == 0
    assert losses[2] == losses[3] == losses[4] != losses[5]


def test_target_actions_are_smoothed_by_noise_that_is_clipped() -> None:
    # So much noise is clipped always: to plus or minus 0.3 in each entry.
    made = make(TD3, target_noise=1e6, target_noise_clip=0.3, **SGD)
    state, sample = some_state(made), random_sample(made)._replace(discount=np.full(S, 0.9, np.float32))
    _, _, priority = learn(made, state, sample)
    possible = np.array(
        [
            np.abs(errors_of(made, state, sample, 0.3 * np.array(signs))).mean(0)
            for signs in itertools.product((-1, 1), repeat=2)
        ]
    )
    distance = np.abs(possible - priority)
    assert distance.min(0).max() < 1e-3
    assert len(set(distance.argmin(0))) > 1


def test_it_explores_with_the_noise_that_is_configured() -> None:
    made = make(TD3, exploration_noise=0.05, random_start=False)
    state = made.init(jax.random.key(0))  # whose actions are in the middle
    row = random_observation(made.env_spec.observation, (1,), np.random.default_rng(1))
    observation, first = np.tile(row, (20_000, 1)), np.zeros(20_000, bool)
    action, _, _ = jax.jit(made.act)(made.actor_params(state), jax.random.key(0), observation, first, ())
    greedy, _ = made.act_greedy(made.actor_params(state), row, first[:1], ())
    np.testing.assert_allclose(scaled(np.asarray(greedy)), np.tanh(policy_outputs(state.policy, row)), atol=1e-5)
    noise = scaled(np.asarray(action)) - scaled(np.asarray(greedy))
    np.testing.assert_allclose(noise.mean(0), 0, atol=2e-3)
    np.testing.assert_allclose(noise.std(0), 0.05, rtol=0.03)
    assert abs(np.corrcoef(noise.T)[0, 1]) < 0.05


def test_ddpg_is_td3_with_its_additions_switched_off() -> None:
    switched_off = TD3.Config(twin=False, policy_delay=1, target_noise=0.0)
    assert DDPG.Config().model_dump() == switched_off.model_dump()
    assert (DDPG.learn, DDPG.explore) == (TD3.learn, TD3.explore)
