"""What SAC, TD3 and DDPG have in common: bounds, the first random actions, what they refuse."""

from typing import Any

import jax
import numpy as np
import pytest
from controls import SGD, WITH_IMAGES, bounded, learn, make, random_sample, some_state
from helpers import SPECS, random_observation
from scipy import stats

from tianji_jax.agent import CanBeGreedy, ReplayAgent, ReplaySpec
from tianji_jax.agents.control import Control
from tianji_jax.agents.control_networks import ControlNetworkConfig
from tianji_jax.agents.sac import SAC
from tianji_jax.agents.td3 import DDPG, TD3
from tianji_jax.types import EnvSpec, MultiDiscreteActions

AGENTS = [SAC, TD3]
ODD = bounded((-0.1, 1e-3, -3e38, -7.3), (0.3, 1e7, 3e38, -7.2))
NAN = float("nan")


def act(agent: Any, state: Any, size: int, greedy: bool = False) -> np.ndarray:
    observation = random_observation(agent.env_spec.observation, (size,), np.random.default_rng(0))
    params, first = agent.actor_params(state), np.zeros(size, bool)
    if greedy:
        return np.asarray(agent.act_greedy(params, observation, first, ())[0])
    action, extras, after = jax.jit(agent.act)(params, jax.random.key(1), observation, first, ())
    assert (extras, after) == ({}, ())
    return np.asarray(action)


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("greedy", [False, True])
def test_actions_never_leave_the_box(agent: type[Control], greedy: bool) -> None:
    made = make(agent, ODD, random_start=False)
    for scale in (0.5, 1e4):  # and policies that are as sure as can be are at its edges
        action = act(made, some_state(made, scale), 500, greedy)
        assert action.dtype == np.float32
        assert (action >= made.low).all()
        assert (action <= made.high).all()
    assert (action == made.low).any(0).any()
    assert (action == made.high).any(0).any()


@pytest.mark.parametrize("agent", AGENTS)
def test_actions_are_scaled_there_and_back(agent: type[Control]) -> None:
    made = make(agent)
    inside = np.array([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0], [0.5, -0.2]], np.float32)
    outside = [[-1.0, 0.0], [0.0, 2.5], [1.0, 5.0], [0.5, 2.0]]
    np.testing.assert_allclose(made.to_box(inside), outside, rtol=1e-6)
    np.testing.assert_allclose(made.from_box(np.array(outside, np.float32)), inside, atol=1e-6)


@pytest.mark.parametrize("agent", AGENTS)
def test_actions_are_random_until_the_first_gradient_step(agent: type[Control]) -> None:
    made = make(agent)
    state = made.init(jax.random.key(0))
    first, second = act(made, state, 4000).T
    assert stats.kstest(first, stats.uniform(-1, 2).cdf).pvalue > 1e-3
    assert stats.kstest(second, stats.uniform(0, 5).cdf).pvalue > 1e-3
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.06
    after = state._replace(steps=np.int32(1))
    assert stats.kstest(act(made, after, 4000)[:, 0], stats.uniform(-1, 2).cdf).pvalue < 1e-6
    # With this switched off, or greedily, never. A new policy stays in the middle.
    never = make(agent, random_start=False)
    assert stats.kstest(act(never, state, 4000)[:, 0], stats.uniform(-1, 2).cdf).pvalue < 1e-6
    assert np.ptp(act(made, state, 50, greedy=True), axis=0).max() < 1


def test_images_are_learned_from() -> None:
    made = make(SAC, WITH_IMAGES, **SGD)
    state, sample = some_state(made, 0.1), random_sample(made)
    other = {**sample.observation, "image": 255 - sample.observation["image"]}
    moved = [learn(made, state, s) for s in (sample, sample._replace(observation=other))]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(moved))
    assert not np.allclose(moved[0][2], moved[1][2])
    kernels = [jax.tree.leaves(m[0].critics["params"]["trunk"])[-1] for m in moved]
    assert not np.array_equal(*kernels)


@pytest.mark.parametrize("agent", [*AGENTS, DDPG])
def test_what_they_are_and_what_they_refuse(agent: type[Control]) -> None:
    name = agent.__name__
    made = make(agent, n_step=3, discount=0.9, reward_clip=1.0)
    assert isinstance(made, ReplayAgent)
    assert isinstance(made, CanBeGreedy)
    assert made.replay == ReplaySpec(3, 0.9, 1.0)
    discrete = EnvSpec("many", SPECS["vector"].observation, MultiDiscreteActions((2, 3)))
    for spec in (SPECS["vector"], SPECS["image"], discrete):
        with pytest.raises(ValueError, match=f"{name} takes continuous actions; {spec.name} has .*Discrete"):
            make(agent, spec)
    for high in (float("inf"), NAN):
        with pytest.raises(ValueError, match=rf"{name} needs actions bounded on both sides; .* high=\(1.0, {high}\)"):
            make(agent, bounded((0.0, 0.0), (1.0, high)))
    with pytest.raises(ValueError, match=f"{name} needs a lower bound below the upper one"):
        make(agent, bounded((0.0, 0.0), (1.0, 0.0)))
    with pytest.raises(ValueError, match=r"agent\.network\.recurrence is 'gru'"):
        make(agent, network=ControlNetworkConfig(recurrence="gru"))
    with pytest.raises(ValueError, match=r"agent\.network\.shared_torso is true"):
        make(agent, network=ControlNetworkConfig(shared_torso=True))
