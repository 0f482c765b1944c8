"""R2D2: targets, errors and priorities against NumPy, which steps count, and what it refuses."""

from typing import Any

import jax
import numpy as np
import pytest
from helpers import SPECS, rollout, split, split_trajectory

from tianji_jax.agent import CanBeGreedy, ReplayAgent
from tianji_jax.agents.r2d2 import R2D2, R2D2NetworkConfig, rescale_value, unscale_value
from tianji_jax.types import SampledUnrolls

T, S = 12, 8
SGD = {"optimizer": "sgd", "learning_rate": 0.1, "max_gradient_norm": None}


def make(spec: str = "vector", recurrence: Any = "gru", **settings: Any) -> R2D2:
    network = R2D2NetworkConfig(hidden_sizes=(6,), recurrence=recurrence, recurrent_size=5)
    return R2D2(R2D2.Config(**{"network": network, **SGD, **settings}), SPECS[spec])


def disturbed(agent: R2D2, seed: int = 0) -> Any:
    """A state whose target network is another one."""
    state = agent.init(jax.random.key(seed))
    return state._replace(target=agent.init(jax.random.key(seed + 1)).network)


def random_unrolls(agent: R2D2, seed: int = 0) -> SampledUnrolls:
    params = agent.actor_params(agent.init(jax.random.key(9)))
    rng = np.random.default_rng(seed)
    trajectory = rollout(agent, params, T, S, seed).trajectory
    return SampledUnrolls(trajectory, rng.random(S).astype(np.float32), np.zeros(S, np.int32))


def learn(agent: R2D2, state: Any, sample: SampledUnrolls, devices: int = 1) -> tuple[Any, dict[str, Any], Any]:
    def step(state: Any, sample: SampledUnrolls) -> Any:
        state, metrics, priority = agent.learn(state, sample, jax.random.key(0), "data")
        return state, jax.lax.pmean(metrics, "data"), priority

    trajectory = split_trajectory(sample.trajectory, devices)
    shards = SampledUnrolls(trajectory, split(sample.weight, devices), split(sample.age, devices))
    program = jax.pmap(step, "data", in_axes=(None, 0), out_axes=(None, None, 0), devices=jax.devices()[:devices])
    state, metrics, priority = jax.device_get(program(state, shards))
    return state, metrics, priority.reshape(-1)


def q_values(agent: R2D2, variables: Any, sample: SampledUnrolls) -> np.ndarray:
    """`[T + 1, S, actions]`, one step at a time as actors do it."""
    trajectory, values = sample.trajectory, []
    step = jax.jit(lambda *inputs: agent.values(agent.network, *inputs))
    state = trajectory.state
    for t in range(T + 1):
        observation = jax.tree.map(lambda x: x[t], trajectory.observation)  # noqa: B023
        q, state = step(variables, observation, trajectory.is_first[t], state)
        values.append(np.asarray(q, np.float64))
    return np.stack(values)


def h(x: float, eps: float) -> float:
    return float(np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + eps * x)


def inverse_of_h(y: float, eps: float) -> float:
    """By bisection."""
    low, high = -1e6, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if h(middle, eps) < y else (low, middle)
    return low


def oracle(agent: R2D2, state: Any, sample: SampledUnrolls) -> tuple[float, np.ndarray]:
    """Loss and priorities, by playing each unroll step by step."""
    config, trajectory = agent.config, sample.trajectory
    now, later = q_values(agent, state.network, sample), q_values(agent, state.target, sample)
    eps = config.rescale
    squared, counted, priorities = 0.0, 0, []
    for s in range(S):
        errors, begun = [], False
        for t in range(T):
            begun |= bool(trajectory.is_first[t, s])
            if not trajectory.valid[t, s] or (t < config.burn_in and not begun):
                continue
            total, discount, k = 0.0, 1.0, t
            while True:
                reward = float(trajectory.reward[k, s])
                if config.reward_clip is not None:
                    reward = min(max(reward, -config.reward_clip), config.reward_clip)
                total += discount * reward
                discount *= config.discount
                k += 1
                if trajectory.terminated[k - 1, s]:
                    discount = 0.0
                if discount == 0 or trajectory.truncated[k - 1, s] or k == T or k - t == config.n_step:
                    break
            best = int(np.argmax((now if config.double else later)[k, s]))
            value = later[k, s, best]
            if eps is not None:
                value = inverse_of_h(value, eps)
            goal = total + discount * value
            if eps is not None:
                goal = h(goal, eps)
            errors.append(now[t, s, trajectory.action[t, s]] - goal)
        squared += sample.weight[s] * sum(e**2 for e in errors) / 2
        counted += len(errors)
        sizes = np.abs(errors) if errors else np.zeros(1)
        priorities.append(0.9 * sizes.max() + 0.1 * sizes.mean())
    return squared / counted, np.array(priorities)


@pytest.mark.parametrize(
    ("recurrence", "settings"),
    [
        ("gru", {"n_step": 3, "burn_in": 4}),
        ("lstm", {"n_step": 1, "double": False, "dueling": False, "reward_clip": 0.5}),
        ("gru", {"n_step": 20, "burn_in": 11, "rescale": None}),
    ],
)
def test_loss_and_priorities_are_those_of_the_paper(recurrence: str, settings: dict[str, Any]) -> None:
    agent = make(recurrence=recurrence, discount=0.9, **settings)
    state, sample = disturbed(agent), random_unrolls(agent)
    _, metrics, priority = learn(agent, state, sample)
    loss, priorities = oracle(agent, state, sample)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-3)
    np.testing.assert_allclose(priority, priorities, rtol=1e-3, atol=1e-4)


def test_one_step_of_sgd_follows_the_slope_of_the_loss() -> None:
    agent = make(n_step=T, burn_in=3, double=False)
    state, sample = disturbed(agent), random_unrolls(agent)
    after, _, _ = learn(agent, state, sample)

    def moved(by: np.ndarray) -> Any:
        head = state.network["params"]["action_head"]
        params = {**state.network["params"], "action_head": {**head, "bias": head["bias"] + by}}
        return state._replace(network={"params": params})

    # Without `double` targets do not depend on the network.
    before = np.asarray(state.network["params"]["action_head"]["bias"])
    change = np.asarray(after.network["params"]["action_head"]["bias"]) - before
    for action, by in enumerate(1e-2 * np.eye(agent.num_actions)):
        slope = (oracle(agent, moved(by), sample)[0] - oracle(agent, moved(-by), sample)[0]) / 2e-2
        assert change[action] == pytest.approx(-0.1 * slope, rel=1e-2, abs=1e-5)


def test_four_devices_learn_what_one_does() -> None:
    agent = make(burn_in=4)
    state, sample = disturbed(agent), random_unrolls(agent)
    one, four = (learn(agent, state, sample, devices) for devices in (1, 4))
    for a, b in zip(jax.tree.leaves(one[0].network), jax.tree.leaves(four[0].network), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(one[2], four[2], rtol=1e-4)
    for name in one[1]:
        assert one[1][name] == pytest.approx(four[1][name], rel=1e-4), name


def test_steps_count_after_the_burn_in_or_from_the_first_of_an_episode() -> None:
    agent = make(burn_in=3)
    first = np.zeros((7, 3), bool)
    first[1, 1] = first[4, 2] = True
    valid = np.ones((6, 3), bool)
    valid[3, 2] = False  # resets, and the next observation is the first
    trajectory = random_unrolls(agent).trajectory._replace(is_first=first, valid=valid)
    expected = ["000111", "011111", "000011"]
    assert ["".join(map(str, column.astype(int))) for column in np.asarray(agent.counts(trajectory)).T] == expected


def test_an_unroll_without_a_step_that_counts_changes_nothing() -> None:
    agent = make(burn_in=4)
    state, sample = disturbed(agent), random_unrolls(agent)
    first = np.zeros((T + 1, S), bool)
    valid = np.ones((T, S), bool)
    valid[4:] = False
    trajectory = sample.trajectory._replace(is_first=first, valid=valid)
    after, metrics, priority = learn(agent, state, sample._replace(trajectory=trajectory))
    assert metrics["loss"] == 0
    assert not priority.any()
    jax.tree.map(np.testing.assert_array_equal, after.network, jax.device_get(state.network))


@pytest.mark.parametrize("eps", [0.0, 1e-3, 0.1])
def test_values_are_rescaled_and_back(eps: float) -> None:
    numbers = np.array([-3e4, -100, -1, -0.01, 0, 1e-3, 0.5, 7, 2500, 1e5], np.float32)
    small = rescale_value(numbers, eps)
    np.testing.assert_allclose(small, [h(float(x), eps) for x in numbers], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(unscale_value(small, eps), numbers, rtol=1e-3, atol=1e-5)


def test_what_is_remembered_is_acted_upon() -> None:
    agent = make()
    params = agent.actor_params(agent.init(jax.random.key(0)))
    rng = np.random.default_rng(0)
    observation = rng.normal(size=(S, 4)).astype(np.float32)
    state, not_first = agent.initial_state(S), np.zeros(S, bool)
    action, same = agent.act_greedy(params, observation, not_first, state)
    assert action.dtype == np.int32
    _, other = agent.act_greedy(params, observation, not_first, jax.tree.map(lambda x: x + 1, state))
    assert not np.allclose(same[0], other[0])
    _, reset = agent.act_greedy(params, observation, ~not_first, jax.tree.map(lambda x: x + 1, state))
    np.testing.assert_array_equal(same[0], reset[0])


def test_what_it_is_and_what_it_refuses() -> None:
    agent = make()
    assert isinstance(agent, ReplayAgent)
    assert isinstance(agent, CanBeGreedy)
    assert agent.replay.unrolls
    assert R2D2.Config().network.recurrence == "lstm"
    assert R2D2.Config.model_validate({"network": {"recurrent_size": 8}}).network.recurrence == "lstm"
    with pytest.raises(ValueError, match=r"agent\.network\.recurrence is none.*agent\.name=dqn"):
        make(recurrence="none")
    with pytest.raises(ValueError, match="R2D2 takes one discrete action at a time"):
        make("continuous")
    agent = make(burn_in=T)
    with pytest.raises(ValueError, match=r"agent\.burn_in is 12.*actors\.unroll_length=12"):
        learn(agent, disturbed(agent), random_unrolls(agent))
