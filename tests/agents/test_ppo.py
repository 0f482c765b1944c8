import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Learner, assert_close, make_agent, rollout, shard

from tianji_jax import losses
from tianji_jax.returns import Steps, gae, vtrace

T, B = 8, 4
SGD = {"optimizer": "sgd", "learning_rate": 0.1, "max_gradient_norm": None}
RECURRENT = {"recurrence": "lstm", "recurrent_size": 8}


def steps_of(batch, value):
    trajectory = batch.trajectory
    return Steps(value, trajectory.reward, trajectory.terminated, trajectory.truncated, trajectory.valid)


def surrogate(agent, params, batch, advantage):
    unroll = agent.unroll(params, batch)
    log_weight = losses.log_importance_weight(unroll.log_prob, batch.trajectory.extras["log_prob"], batch.weight)
    return -float(losses.clipped_surrogate_loss(log_weight, advantage, 0.2, batch.weight))


@pytest.mark.parametrize("network", [{}, RECURRENT])
def test_an_update_improves_the_surrogate(network):
    agent = make_agent("ppo", network=network, learning_rate=3e-3, discount=0.0)
    state = agent.init(jax.random.key(0))
    batch = rollout(agent, state.params, 16, 8)
    trajectory = batch.trajectory._replace(reward=batch.trajectory.action.astype(np.float32))
    batch = batch._replace(trajectory=trajectory)
    estimate = gae(steps_of(batch, agent.unroll(state.params, batch).value), 0.0, 0.95)
    advantage = losses.normalise(estimate.advantage, batch.weight)
    after, _ = Learner(agent).update(state, batch)
    before, now = (surrogate(agent, s.params, batch, advantage) for s in (state, after))
    assert now > before + 0.05


@pytest.mark.parametrize("stale", [False, True])
def test_advantages_are_gae_where_fresh_and_v_trace_where_stale(stale):
    """One full-batch SGD step against the gradient written out."""
    agent = make_agent("ppo", **SGD, epochs=1, minibatches=1, value_clip=0.1)
    state = agent.init(jax.random.key(0))
    batch = rollout(agent, state.params, T, B)
    shift = np.linspace(-0.15, 0.15, T * B, dtype=np.float32).reshape(T, B)
    log_prob = batch.trajectory.extras["log_prob"] - shift
    batch = batch._replace(trajectory=batch.trajectory._replace(extras={"log_prob": log_prob}), stale=np.full(B, stale))
    trajectory, valid = batch.trajectory, batch.trajectory.valid
    steps = steps_of(batch, agent.unroll(state.params, batch).value)
    estimate = vtrace(steps, shift, 0.99, 0.95) if stale else gae(steps, 0.99, 0.95)
    advantage = (estimate.advantage[valid] - estimate.advantage[valid].mean()) / estimate.advantage[valid].std()

    def loss(network):
        logits, value, _ = agent.forward(
            state.params._replace(network=network), trajectory.observation, trajectory.is_first, ()
        )
        log_probs = jax.nn.log_softmax(logits[:-1])
        chosen = jnp.sum(log_probs * jax.nn.one_hot(trajectory.action, 2), axis=-1)
        ratio = jnp.exp(chosen - log_prob)[valid]  # within the clipping range everywhere
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)[valid]
        error = 0.5 * (estimate.target - value[:-1])[valid] ** 2
        return (-ratio * advantage + 0.5 * error - 0.01 * entropy).mean()

    gradient = jax.grad(loss)(state.params.network)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, state.params.network, gradient)
    after, _ = Learner(agent).update(state, batch)
    assert_close(after.params.network, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("network", "unit", "count"), [({}, 1, T * B), (RECURRENT, T, B)])
def test_each_epoch_sees_each_sample_once_and_in_another_order(network, unit, count):
    agent = make_agent("ppo", network=network, epochs=3, minibatches=2)
    batch = rollout(agent, agent.init(jax.random.key(0)).params, T, B)
    zeros = jnp.zeros((T, B))
    samples = agent._samples(batch, zeros, zeros, zeros)
    assert samples.weight.shape == (unit, count)
    indices = agent._minibatch_indices(samples, jax.random.key(0))
    assert indices.shape == (6, count // 2)
    for epoch in indices.reshape(3, -1):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(count))
    assert len({tuple(epoch.tolist()) for epoch in indices.reshape(3, -1)}) == 3


@pytest.mark.parametrize(("network", "unit"), [({}, "32 steps"), (RECURRENT, "4 environments")])
def test_a_batch_that_minibatches_do_not_divide_is_refused(network, unit):
    agent = make_agent("ppo", network=network, minibatches=3)
    state = agent.init(jax.random.key(0))
    with pytest.raises(ValueError, match=f"agent.minibatches 3 does not divide the {unit}"):
        Learner(agent).update(state, rollout(agent, state.params, T, B))


def test_minibatches_on_two_devices_leave_the_same_parameters_on_both():
    agent = make_agent("ppo", network=RECURRENT, epochs=2, minibatches=2)
    state = agent.init(jax.random.key(0))
    batch = rollout(agent, state.params, T, 8)
    both = jax.pmap(
        lambda s, b, r: agent.update(s, b, r, "data")[0],
        axis_name="data",
        in_axes=(None, 0, 0),
        devices=jax.devices()[:2],
    )(state, shard(batch, 2), jax.random.split(jax.random.key(1), 2))
    jax.tree.map(lambda x: np.testing.assert_array_equal(x[0], x[1]), jax.device_get(both))


def test_it_learns_which_action_is_rewarded():
    agent = make_agent("ppo", learning_rate=0.003)
    state, learner = jax.device_get(agent.init(jax.random.key(0))), Learner(agent)
    for seed in range(20):
        batch = rollout(agent, state.params, 16, 8, seed)
        trajectory = batch.trajectory._replace(reward=batch.trajectory.action.astype(np.float32))
        state, _ = learner.update(state, batch._replace(trajectory=trajectory), seed)
    assert rollout(agent, state.params, 16, 8, 99).trajectory.action.mean() > 0.8
