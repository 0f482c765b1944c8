"""DQN: its loss and targets against NumPy, its exploration, and what it refuses."""

from typing import Any

import jax
import numpy as np
import pytest
from helpers import SPECS, random_observation

from tianji_jax.agent import CanBeGreedy, ReplayAgent, ReplaySpec
from tianji_jax.agents.dqn import DQN, quantile_huber_loss
from tianji_jax.agents.networks import NetworkConfig
from tianji_jax.agents.q_learning import ActingParams
from tianji_jax.types import Sample

S = 8
SGD = {"optimizer": "sgd", "learning_rate": 0.1, "max_gradient_norm": None}
SMALL = {"network": NetworkConfig(hidden_sizes=(5,))}


def make(spec: str = "vector", **settings: Any) -> DQN:
    return DQN(DQN.Config(**{**SMALL, **settings}), SPECS[spec])


def random_sample(agent: DQN, seed: int = 0, size: int = S) -> Sample:
    rng = np.random.default_rng(seed)
    observation, after = (random_observation(agent.env_spec.observation, (size,), rng) for _ in range(2))
    return Sample(
        observation=observation,
        action=rng.integers(0, agent.num_actions, size, np.int32),
        reward=(3 * rng.normal(size=size)).astype(np.float32),
        discount=np.where(rng.random(size) < 0.3, 0.0, 0.9).astype(np.float32),
        next_observation=after,
        weight=rng.random(size).astype(np.float32),
        age=np.zeros(size, np.int32),
    )


def learn(agent: DQN, state: Any, sample: Sample, devices: int = 1) -> tuple[Any, dict[str, Any], Any]:
    def step(state: Any, sample: Sample) -> Any:
        state, metrics, error = agent.learn(state, sample, jax.random.key(0), "data")
        return state, jax.lax.pmean(metrics, "data"), error

    shards = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), sample)
    program = jax.pmap(step, "data", in_axes=(None, 0), out_axes=(None, None, 0), devices=jax.devices()[:devices])
    state, metrics, error = jax.device_get(program(state, shards))
    return state, metrics, error.reshape(-1)


def disturbed(agent: DQN, seed: int) -> Any:
    """A state whose target network is another one."""
    state = agent.init(jax.random.key(seed))
    return state._replace(target=agent.init(jax.random.key(seed + 1)).network)


def q_values(variables: Any, observation: np.ndarray, dueling: bool, quantiles: int = 1) -> np.ndarray:
    """One row at a time, from the weights."""
    params = jax.device_get(variables["params"])
    rows = []
    for x in np.asarray(observation, np.float64):
        for layer in params["trunk"].values():
            x = np.tanh(layer["kernel"].T @ x + layer["bias"])
        heads = {name: params[name]["kernel"].T @ x + params[name]["bias"] for name in params if name != "trunk"}
        q = heads["action_head"].reshape(-1, quantiles)
        rows.append(heads["value_head"] + q - sum(q) / len(q) if dueling else q)
    return np.array(rows) if quantiles > 1 else np.array(rows)[..., 0]


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dueling", [False, True])
def test_loss_and_errors_are_those_of_the_papers(double: bool, dueling: bool) -> None:
    agent = make(double=double, dueling=dueling, huber_delta=0.7, **SGD)
    state, sample = disturbed(agent, 3), random_sample(agent)
    _, metrics, errors = learn(agent, state, sample)

    now = q_values(state.network, sample.observation, dueling)
    after = q_values(state.target, sample.next_observation, dueling)
    choice = q_values(state.network, sample.next_observation, dueling) if double else after
    losses = []
    for i in range(S):
        best = max(range(agent.num_actions), key=lambda a: choice[i][a])
        target = sample.reward[i] + sample.discount[i] * after[i][best]
        error = now[i][sample.action[i]] - target
        assert errors[i] == pytest.approx(error, rel=1e-4, abs=1e-5)
        size = abs(error)
        losses.append(sample.weight[i] * (size**2 / 2 if size < 0.7 else 0.7 * (size - 0.35)))
    assert metrics["loss"] == pytest.approx(sum(losses) / S, rel=1e-4)


@pytest.mark.parametrize("double", [False, True])
def test_quantiles_are_learned_as_in_their_paper(double: bool) -> None:
    count, delta = 3, 0.7
    agent = make(double=double, dueling=True, quantiles=count, huber_delta=delta, **SGD)
    state, sample = disturbed(agent, 3), random_sample(agent)
    _, metrics, errors = learn(agent, state, sample)

    now = q_values(state.network, sample.observation, True, count)
    after = q_values(state.target, sample.next_observation, True, count)
    choice = q_values(state.network, sample.next_observation, True, count) if double else after
    total = 0.0
    for s in range(S):
        best = max(range(agent.num_actions), key=lambda a: sum(choice[s][a]))
        goal = [sample.reward[s] + sample.discount[s] * z for z in after[s][best]]
        taken = now[s][sample.action[s]]
        assert errors[s] == pytest.approx(np.mean(taken) - np.mean(goal), rel=1e-4, abs=1e-5)
        for i, theta in enumerate(taken):  # equation 10 over delta: sum over quantiles of the mean over samples
            for z in goal:
                u = z - theta
                huber = u**2 / 2 if abs(u) <= delta else delta * (abs(u) - delta / 2)
                total += sample.weight[s] * abs((2 * i + 1) / (2 * count) - (u < 0)) * huber / delta / count
    assert metrics["loss"] == pytest.approx(total / S, rel=1e-4)


def test_what_minimises_the_quantile_loss_are_the_quantiles() -> None:
    goal = np.random.default_rng(0).gamma(2.0, size=(1, 2000)).astype(np.float32)
    descend = jax.jit(lambda x: x - 0.05 * jax.grad(lambda x: quantile_huber_loss(x, goal, 0.01)[0])(x))
    found = np.zeros((1, 5), np.float32)
    for _ in range(1000):
        found = descend(found)
    np.testing.assert_allclose(found[0], np.quantile(goal, [0.1, 0.3, 0.5, 0.7, 0.9]), atol=0.05)


def test_one_step_of_sgd_follows_the_slope_of_the_loss() -> None:
    agent = make(**SGD)
    state, sample = disturbed(agent, 0), random_sample(agent)
    after, _, errors = learn(agent, state, sample)
    targets = q_values(state.network, sample.observation, False)[np.arange(S), sample.action] - errors

    def loss(bias: np.ndarray) -> float:
        head = {**state.network["params"]["action_head"], "bias": bias}
        values = q_values({"params": {**state.network["params"], "action_head": head}}, sample.observation, False)
        distance = np.abs(values[np.arange(S), sample.action] - targets)
        return float(np.mean(sample.weight * np.where(distance < 1, distance**2 / 2, distance - 0.5)))

    before, moved = (np.asarray(s.network["params"]["action_head"]["bias"], np.float64) for s in (state, after))
    for action, change in enumerate(1e-3 * np.eye(agent.num_actions)):
        slope = (loss(before + change) - loss(before - change)) / 2e-3
        assert moved[action] - before[action] == pytest.approx(-0.1 * slope, rel=1e-2, abs=1e-6)


def test_four_devices_learn_what_one_does() -> None:
    agent = make(dueling=True, **SGD)
    state, sample = disturbed(agent, 0), random_sample(agent)
    one, four = (learn(agent, state, sample, devices) for devices in (1, 4))
    for a, b in zip(jax.tree.leaves(one[0].network), jax.tree.leaves(four[0].network), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(one[2], four[2], rtol=1e-5)
    assert one[1]["loss"] == pytest.approx(four[1]["loss"], rel=1e-5)


@pytest.mark.parametrize("rate", [1.0, 0.25])
def test_the_target_network_follows_once_in_a_period(rate: float) -> None:
    agent = make(target_period=3, target_rate=rate, **SGD)
    state = disturbed(agent, 0)
    for step in range(1, 7):
        before = jax.device_get(state.target)
        state, _, _ = learn(agent, state, random_sample(agent, step))
        for old, new, network in zip(*map(jax.tree.leaves, (before, state.target, state.network)), strict=True):
            expected = old if step % 3 else old + rate * (network - old)
            np.testing.assert_allclose(new, expected, rtol=1e-5, atol=1e-6)
    assert state.steps == 6


def test_epsilon_falls_with_the_gradient_steps_and_is_spread_over_the_environments() -> None:
    agent = make(epsilon_start=0.9, epsilon_end=0.4, epsilon_gradient_steps=100, epsilon_spread=7.0)
    state = agent.init(jax.random.key(0))
    for steps, expected in ((0, 0.9), (50, 0.65), (100, 0.4), (10_000, 0.4)):
        epsilon = agent.actor_params(state._replace(steps=np.int32(steps))).epsilon
        assert epsilon == pytest.approx(expected)
    # Horgan et al. 2018: epsilon_i = epsilon^(1 + i / (N - 1) alpha).
    expected = [0.4 ** (1 + i / 7 * 7) for i in range(8)]
    np.testing.assert_allclose(agent.epsilons(np.float32(0.4), 8), expected, rtol=1e-4)
    np.testing.assert_allclose(agent.epsilons(np.float32(0.4), 1), [0.4], rtol=1e-5)
    np.testing.assert_allclose(make().epsilons(np.float32(0.3), 4), [0.3] * 4, rtol=1e-5)


def test_it_explores_as_often_as_epsilon_says() -> None:
    agent = make(epsilon_spread=1.0)
    params = ActingParams(agent.init(jax.random.key(0)).network, np.float32(0.5))
    observation = np.tile(random_observation(agent.env_spec.observation, (1,), np.random.default_rng(0)), (3, 1))
    first = np.zeros(3, bool)
    greedy, _ = agent.act_greedy(params, observation, first, ())
    act = jax.jit(jax.vmap(lambda rng: agent.act(params, rng, observation, first, ())[0]))
    actions = np.asarray(act(jax.random.split(jax.random.key(1), 20_000)))
    # Of two actions a random one is the greedy one half of the time.
    others = (actions != np.asarray(greedy)).mean(axis=0)
    np.testing.assert_allclose(others, [0.5 / 2, 0.5**1.5 / 2, 0.5**2 / 2], atol=0.012)


def test_forbidden_actions_are_neither_taken_nor_valued() -> None:
    agent = make("masked", double=False, epsilon_spread=0.0)
    state = disturbed(agent, 0)
    observation = random_observation(agent.env_spec.observation, (16,), np.random.default_rng(0))
    first, mask, act = np.zeros(16, bool), observation["mask"] != 0, jax.jit(agent.act)
    for epsilon in (0.0, 1.0):
        params = ActingParams(state.network, np.float32(epsilon))
        taken = []
        for seed in range(40):
            action, extras, _ = act(params, jax.random.key(seed), observation, first, ())
            assert mask[np.arange(16), action].all()
            assert extras == {}
            taken.append(np.asarray(action))
        if epsilon == 1.0:  # and all allowed ones are
            assert all(set(np.array(taken)[:, i]) == set(np.flatnonzero(mask[i])) for i in range(16))
    sample = random_sample(agent, size=16)
    values = np.asarray(agent.values(agent.network, state.target, sample.next_observation, first, ())[0])
    allowed = np.where(sample.next_observation["mask"] != 0, values, -np.inf).max(-1)
    now = np.asarray(agent.values(agent.network, state.network, sample.observation, first, ())[0])
    now = now[np.arange(16), sample.action]
    _, _, errors = learn(agent, state, sample)
    taken_is_allowed = sample.observation["mask"][np.arange(16), sample.action] != 0
    expected = now - (sample.reward + sample.discount * allowed)
    np.testing.assert_allclose(errors[taken_is_allowed], expected[taken_is_allowed], rtol=1e-4, atol=1e-4)


def test_an_observation_that_allows_nothing_still_has_a_value() -> None:
    agent = make("masked")
    state, sample = disturbed(agent, 0), random_sample(agent)
    sample.observation["mask"][:] = 1
    sample.next_observation["mask"][:] = 0
    _, _, errors = learn(agent, state, sample)
    assert (np.abs(errors) < 100).all()


def test_images_are_learned_from() -> None:
    # Among the masked observations there is one.
    agent = make("masked", dueling=True)
    state, sample = disturbed(agent, 0), random_sample(agent)
    other = {**sample.observation, "screen": 255 - sample.observation["screen"]}
    errors = [learn(agent, state, s)[2] for s in (sample, sample._replace(observation=other))]
    assert np.isfinite(errors).all()
    assert not np.allclose(*errors)


def test_what_it_is_and_what_it_refuses() -> None:
    agent = make(n_step=3, discount=0.9, reward_clip=1.0)
    assert isinstance(agent, ReplayAgent)
    assert isinstance(agent, CanBeGreedy)
    assert agent.replay == ReplaySpec(3, 0.9, 1.0)
    for spec in ("continuous", "image", "masked_multi"):
        with pytest.raises(ValueError, match="DQN takes one discrete action at a time"):
            make(spec)
    with pytest.raises(ValueError, match=r"agent\.network\.recurrence is 'gru'"):
        make(network=NetworkConfig(recurrence="gru"))
    with pytest.raises(ValueError, match=r"agent\.network\.shared_torso"):
        make(network=NetworkConfig(shared_torso=True))
