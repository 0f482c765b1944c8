import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Learner, assert_close, make_agent, rollout

from tianji_jax.returns import Steps, vtrace

T, B = 8, 4
SETTINGS = {"optimizer": "sgd", "learning_rate": 0.1, "max_gradient_norm": None}


def test_one_update_is_one_step_down_the_paper_s_loss():
    agent = make_agent("impala", **SETTINGS, rho_bar=1.5, entropy_coefficient=0.05)
    state = agent.init(jax.random.key(0))
    batch = rollout(agent, state.params, T, B)
    # Behaviour other than the current policy's, so that the weights matter.
    log_prob = batch.trajectory.extras["log_prob"] - np.linspace(-0.5, 0.8, T * B, dtype=np.float32).reshape(T, B)
    stale = np.ones(B, bool)
    batch = batch._replace(trajectory=batch.trajectory._replace(extras={"log_prob": log_prob}), stale=stale)
    trajectory, valid = batch.trajectory, batch.trajectory.valid

    def loss(network):
        logits, value, _ = agent.forward(
            state.params._replace(network=network), trajectory.observation, trajectory.is_first, ()
        )
        log_probs = jax.nn.log_softmax(logits[:-1])
        chosen = jnp.sum(log_probs * jax.nn.one_hot(trajectory.action, 2), axis=-1)
        flags = (trajectory.reward, trajectory.terminated, trajectory.truncated, valid)
        trace = vtrace(Steps(jax.lax.stop_gradient(value), *flags), chosen - log_prob, 0.99, 1.0, 1.5, 1.0)
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
        each = -chosen * trace.rho * trace.advantage + 0.5 * 0.5 * (trace.target - value[:-1]) ** 2 - 0.05 * entropy
        return each[valid].mean()

    gradient = jax.grad(loss)(state.params.network)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, state.params.network, gradient)
    after, metrics = Learner(agent).update(state, batch)
    assert_close(after.params.network, expected, rtol=1e-4, atol=1e-6)
    assert metrics["loss"] == pytest.approx(float(loss(state.params.network)), rel=1e-4)
    assert metrics["ess"] < 0.99
    weights = np.exp(np.linspace(-0.5, 0.8, T * B).reshape(T, B)[valid])
    assert metrics["clip_fraction"] == pytest.approx(np.mean(weights > 1.5), rel=1e-4)


def test_it_learns_which_action_is_rewarded():
    agent = make_agent("impala", learning_rate=0.01)
    state, learner = jax.device_get(agent.init(jax.random.key(0))), Learner(agent)
    for seed in range(30):
        batch = rollout(agent, state.params, 16, 8, seed)
        trajectory = batch.trajectory._replace(reward=batch.trajectory.action.astype(np.float32))
        state, _ = learner.update(state, batch._replace(trajectory=trajectory), seed)
    assert rollout(agent, state.params, 16, 8, 99).trajectory.action.mean() > 0.8
