import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AGENTS, SPECS, Learner, assert_close, make_agent, rollout
from pydantic import ValidationError

from tianji_jax import losses
from tianji_jax.agents.actor_critic import ActorCriticConfig, learning_rate
from tianji_jax.agents.optimizers import make_optimizer
from tianji_jax.types import ArraySpec, DiscreteActions, EnvSpec

T, B = 8, 4
SGD = {"optimizer": "sgd", "learning_rate": 0.1, "max_gradient_norm": None}
ONE_STEP = {"ppo": {"epochs": 1, "minibatches": 1}, "impala": {}}

CASES = [
    ("vector", {}),
    ("vector", {"network": {"shared_torso": True, "recurrence": "lstm", "recurrent_size": 8}}),
    ("continuous", {"network": {"shared_torso": False, "recurrence": "gru", "recurrent_size": 8}}),
    ("continuous", {"squash": True, "normalise_observations": True}),
    ("image", {"network": {"hidden_sizes": [16], "recurrence": "lstm", "recurrent_size": 8}}),
    ("masked", {"network": {"hidden_sizes": [16]}, "normalise_observations": True}),
    ("masked_multi", {"network": {"hidden_sizes": [16]}}),
]


@pytest.mark.parametrize(("spec", "settings"), CASES)
def test_importance_weights_are_one_while_parameters_are_unchanged(spec, settings):
    """From single steps on the actor, with resets in their midst, to the learner's unroll over the trajectory."""
    agent = make_agent("impala", spec, **settings)
    state = agent.init(jax.random.key(0))
    # Away from the initial policy, which is nearly the same everywhere.
    network = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(1), x.shape), state.params.network)
    params = state.params._replace(network=network)
    batch = rollout(agent, params, T, B)
    unroll = jax.jit(agent.unroll)(params, batch)
    behaviour = batch.trajectory.extras["log_prob"]
    assert np.std(behaviour) > 0.01
    np.testing.assert_allclose(unroll.log_prob, behaviour, atol=2e-4)
    assert unroll.value.shape == (T + 1, B)
    log_weight = losses.log_importance_weight(unroll.log_prob, behaviour, batch.weight)
    assert float(losses.effective_sample_size(log_weight, batch.weight)) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(("spec", "settings"), CASES[1:3])
def test_the_recurrent_state_is_reset_where_an_episode_begins(spec, settings):
    agent = make_agent("impala", spec, **settings)
    params = agent.init(jax.random.key(0)).params
    observation, zeros = jnp.ones((B, 4)), agent.initial_state(B)
    other = jax.tree.map(lambda s: s + 1.0, zeros)
    first = jnp.array([True, False, True, False])
    a, _, state_a = agent.forward(params, observation, first, zeros)
    b, _, state_b = agent.forward(params, observation, first, other)
    np.testing.assert_array_equal(a[first], b[first])
    assert not np.allclose(a[~first], b[~first])
    for x, y in zip(jax.tree.leaves(state_a), jax.tree.leaves(state_b), strict=True):
        assert x.dtype == jnp.float32
        np.testing.assert_array_equal(x[first], y[first])
        assert not np.allclose(x[~first], y[~first])


NORMALISED = {"normalise_observations": True, "normalise_rewards": True}
SQUASHED = {"squash": True, "reward_clip": 0.5}
RECURRENT = {"network": {"hidden_sizes": [16], "recurrence": "gru", "recurrent_size": 8}}


@pytest.mark.parametrize(
    ("name", "spec", "settings"),
    [
        ("ppo", "vector", NORMALISED),
        ("impala", "continuous", SQUASHED),
        ("impala", "masked", RECURRENT),
        pytest.param("ppo", "masked", RECURRENT, marks=pytest.mark.slow),
        pytest.param("ppo", "continuous", SQUASHED, marks=pytest.mark.slow),
        pytest.param("impala", "vector", NORMALISED, marks=pytest.mark.slow),
    ],
)
def test_many_devices_find_what_one_does(name, spec, settings):
    agent = make_agent(name, spec, **SGD, **ONE_STEP[name], **settings)
    state = agent.init(jax.random.key(0))
    batch = rollout(agent, state.params, T, B)
    batch = batch._replace(stale=np.array([False, True, False, True]))
    alone, metrics = Learner(agent, 1).update(state, batch)
    moved = optax.tree.norm(optax.tree.sub(alone.params.network, state.params.network))
    assert float(moved) > 1e-3
    for devices in (2, 4):
        together, same_metrics = Learner(agent, devices).update(state, batch)
        assert_close(together, alone, rtol=1e-4, atol=1e-5)
        assert_close(same_metrics, metrics, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", AGENTS)
def test_masked_rows_do_not_change_the_update(name):
    settings = {"normalise_observations": True, "normalise_rewards": True, **SGD, **ONE_STEP[name]}
    agent = make_agent(name, **settings)
    state = agent.init(jax.random.key(0))
    batch = rollout(agent, state.params, T, B)
    invalid = ~batch.trajectory.valid
    assert invalid.any()
    trajectory = batch.trajectory
    changed = trajectory._replace(
        reward=np.where(invalid, 1e6, trajectory.reward).astype(np.float32),
        action=np.where(invalid, 1 - trajectory.action, trajectory.action).astype(np.int32),
        extras={"log_prob": np.where(invalid, -200.0, trajectory.extras["log_prob"]).astype(np.float32)},
    )
    learner = Learner(agent)
    clean, dirty = (learner.update(state, batch._replace(trajectory=t)) for t in (trajectory, changed))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)


@pytest.mark.parametrize("name", AGENTS)
def test_updates_are_traced_once_and_say_what_they_did(name):
    agent = make_agent(name, "vector", normalise_observations=True, normalise_rewards=True)
    learner, state = Learner(agent), jax.device_get(agent.init(jax.random.key(0)))
    for seed in range(3):
        state, metrics = learner.update(state, rollout(agent, state.params, T, B, seed), seed)
    assert learner.traces == 1
    assert set(metrics) == {
        *("loss", "policy_loss", "value_loss", "entropy", "ess", "importance_weight", "clip_fraction"),
        *("kl", "explained_variance", "gradient_norm", "value_mean"),
    }
    for metric in metrics.values():
        assert metric.dtype == np.float32
        assert np.isfinite(metric)
    assert metrics["ess"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["importance_weight"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("name", AGENTS)
def test_acting_and_learning_depend_on_the_key_alone(name):
    agent = make_agent(name)
    state = agent.init(jax.random.key(0))
    first, again = (rollout(agent, state.params, T, B, seed=5) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    learner = Learner(agent)
    jax.tree.map(np.testing.assert_array_equal, learner.update(state, first), learner.update(state, first))


def test_observation_statistics_skip_invalid_steps_images_and_masks_and_ship_to_actors():
    agent = make_agent("impala", "masked", normalise_observations=True, network={"hidden_sizes": [8]})
    state = agent.init(jax.random.key(0))
    batch = rollout(agent, state.params, T, B)
    after, _ = Learner(agent).update(state, batch)
    statistics = agent.actor_params(after).observation_statistics
    assert set(statistics) == {"info"}
    seen = batch.trajectory.observation["info"][:-1][batch.trajectory.valid]
    np.testing.assert_allclose(statistics["info"].mean, seen.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(statistics["info"].variance, seen.var(axis=0), rtol=1e-3)


def test_reward_scaling_makes_the_update_independent_of_the_rewards_unit():
    agent = make_agent("impala", normalise_rewards=True, **SGD)
    state = agent.init(jax.random.key(0))
    # Without a value at the start, the first returns are made of rewards alone.
    network = jax.tree.map(lambda x: x, state.params.network)
    network["params"]["value_head"] = jax.tree.map(jnp.zeros_like, network["params"]["value_head"])
    state = state._replace(params=state.params._replace(network=network))
    batch = rollout(agent, state.params, T, B)
    larger = batch.trajectory._replace(reward=1000 * batch.trajectory.reward)
    learner = Learner(agent)
    small, _ = learner.update(state, batch)
    large, _ = learner.update(state, batch._replace(trajectory=larger))
    assert_close(large.params, small.params, rtol=1e-4, atol=1e-6)
    assert float(large.reward_scale.scale) == pytest.approx(1000 * float(small.reward_scale.scale), rel=1e-4)


def test_greedy_acting_takes_the_mode_and_repeats_itself():
    agent = make_agent("ppo", "continuous")
    params = agent.init(jax.random.key(0)).params
    observation = jnp.ones((B, 4))
    action, state = jax.jit(agent.act_greedy)(params, observation, jnp.zeros(B, bool), ())
    mean, _, _ = agent.forward(params, observation, jnp.zeros(B, bool), ())
    np.testing.assert_allclose(action, np.clip(mean[:, :2], [-1, 0], [1, 5]), rtol=1e-5)
    assert state == ()


def test_continuous_actions_stay_in_bounds_and_the_raw_sample_travels():
    agent = make_agent("ppo", "continuous")
    batch = rollout(agent, agent.init(jax.random.key(0)).params, 50, B)
    raw, action = batch.trajectory.extras["raw_action"], batch.trajectory.action
    np.testing.assert_allclose(action, np.clip(raw, [-1.0, 0.0], [1.0, 5.0]))
    assert np.any(action != raw)


def test_an_unknown_optimizer_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"agent.optimizer 'RMSPropp'.*'rmsprop'"):
        make_agent("ppo", optimizer="RMSPropp")
    with pytest.raises(ValueError, match=r"agent.optimizer_options .*beta.*b1, b2"):
        make_agent("ppo", optimizer_options={"beta": 0.9})


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_learning_rate_falls_to_zero_over_learner_steps(schedule):
    config = ActorCriticConfig(learning_rate_schedule=schedule, schedule_learner_steps=3, **SGD)
    optimizer = make_optimizer(config, learning_rate(config, gradient_steps_per_update=2))
    state, rates = optimizer.init(jnp.zeros(())), []
    for _ in range(7):
        update, state = optimizer.update(jnp.ones(()), state)
        rates.append(-float(update))
    assert rates[0] == pytest.approx(0.1)
    assert rates[3] == pytest.approx(0.05)
    assert rates[6] == pytest.approx(0.0, abs=1e-8)
    with pytest.raises(ValidationError, match="schedule_learner_steps"):
        ActorCriticConfig(learning_rate_schedule=schedule)


def test_gradients_are_limited_to_the_configured_norm():
    agent = make_agent("impala", optimizer="sgd", learning_rate=1.0, max_gradient_norm=0.01)
    state = agent.init(jax.random.key(0))
    after, metrics = Learner(agent).update(state, rollout(agent, state.params, T, B))
    assert metrics["gradient_norm"] > 0.01
    moved = optax.tree.norm(optax.tree.sub(after.params.network, state.params.network))
    assert float(moved) == pytest.approx(0.01, rel=1e-3)


def test_an_environment_that_does_not_fit_is_refused():
    agent = AGENTS["ppo"]
    observation = {"x": ArraySpec((4,), np.float32), "mask": ArraySpec((3,), bool)}
    with pytest.raises(ValueError, match=r"action mask 'mask' must be .* \(2,\)"):
        agent(agent.Config(), EnvSpec("odd", observation, DiscreteActions(2), action_mask="mask"))
    with pytest.raises(ValueError, match="squash is for continuous"):
        agent(agent.Config(squash=True), SPECS["vector"])
