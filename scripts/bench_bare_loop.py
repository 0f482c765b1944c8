"""PPO on EnvPool's CartPole as one bare synchronous loop that shares no code with tianji_jax.

The yardstick of `scripts/bench_cartpole.py`: what the same algorithm takes when nothing stands between the environments
and the update. Run it by itself with

    python scripts/bench_bare_loop.py --seed 0
"""

import argparse
import collections
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import envpool
import jax
import jax.numpy as jnp
import numpy as np
import optax

ENVIRONMENTS, UNROLL = 64, 32
EPOCHS, MINIBATCHES = 4, 4
LEARNING_RATE, MAX_GRADIENT_NORM = 2e-3, 0.5
CLIP, ENTROPY, VALUE = 0.2, 0.01, 0.5
DISCOUNT, TRACE_LAMBDA = 0.99, 0.95
STOP_AT_RETURN, MAX_STEPS = 475.0, 500_000

Params = dict[str, list[tuple[jax.Array, jax.Array]]]
OPTIMIZER = optax.chain(optax.clip_by_global_norm(MAX_GRADIENT_NORM), optax.adam(LEARNING_RATE))


class Rollout(NamedTuple):
    """`UNROLL` steps of all environments, time-major; `observation` has one more, to bootstrap from."""

    observation: np.ndarray
    action: np.ndarray
    log_prob: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    valid: np.ndarray


class Samples(NamedTuple):
    """Single steps, shuffled into minibatches."""

    observation: jax.Array
    action: jax.Array
    log_prob: jax.Array
    advantage: jax.Array
    target: jax.Array
    valid: jax.Array


@partial(jax.jit, static_argnums=(1, 2))
def init(rng: jax.Array, inputs: int, actions: int) -> tuple[Params, Any]:
    """Parameters and the state of their optimiser."""

    def mlp(rng: jax.Array, outputs: int, last_scale: float) -> list[tuple[jax.Array, jax.Array]]:
        sizes, scales = [(inputs, 64), (64, 64), (64, outputs)], [2**0.5, 2**0.5, last_scale]
        keys = jax.random.split(rng, len(sizes))
        return [
            (jax.nn.initializers.orthogonal(scale)(key, size), jnp.zeros(size[1]))
            for key, size, scale in zip(keys, sizes, scales, strict=True)
        ]

    policy_rng, value_rng = jax.random.split(rng)
    params = {"policy": mlp(policy_rng, actions, 0.01), "value": mlp(value_rng, 1, 1.0)}
    return params, OPTIMIZER.init(params)


def mlp(layers: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
    for kernel, bias in layers[:-1]:
        x = jnp.tanh(x @ kernel + bias)
    kernel, bias = layers[-1]
    return x @ kernel + bias


def log_prob_of(logits: jax.Array, action: jax.Array) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], axis=-1)[..., 0]


@jax.jit
def act(params: Params, rng: jax.Array, step: jax.Array, observation: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Actions of all environments and their log-probabilities."""
    logits = mlp(params["policy"], observation)
    action = jax.random.categorical(jax.random.fold_in(rng, step), logits)
    return action, log_prob_of(logits, action)


@partial(jax.jit, donate_argnums=(0, 1))
def update(params: Params, opt_state: Any, rng: jax.Array, rollout: Rollout) -> tuple[Params, Any]:
    """All epochs of PPO on one rollout."""
    value = mlp(params["value"], rollout.observation)[..., 0]
    bootstrap = jnp.where(rollout.terminated, 0.0, value[1:])
    delta = rollout.reward + DISCOUNT * bootstrap - value[:-1]

    def backwards(advantage: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # The step after an end only resets: its advantage is zero, which also cuts the trace.
        delta, valid = step
        advantage = jnp.where(valid, delta + DISCOUNT * TRACE_LAMBDA * advantage, 0.0)
        return advantage, advantage

    _, advantage = jax.lax.scan(backwards, jnp.zeros(ENVIRONMENTS), (delta, rollout.valid), reverse=True)
    samples = Samples(
        rollout.observation[:-1], rollout.action, rollout.log_prob, advantage, advantage + value[:-1], rollout.valid
    )
    samples = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, *x.shape[2:]), samples)
    permutations = jax.vmap(lambda rng: jax.random.permutation(rng, ENVIRONMENTS * UNROLL))(
        jax.random.split(rng, EPOCHS)
    )

    def step(carry: tuple[Params, Any], chosen: jax.Array) -> tuple[tuple[Params, Any], None]:
        params, opt_state = carry
        gradient = jax.grad(loss)(params, jax.tree.map(lambda x: x[chosen], samples))
        updates, opt_state = OPTIMIZER.update(gradient, opt_state)
        return (optax.apply_updates(params, updates), opt_state), None

    (params, opt_state), _ = jax.lax.scan(step, (params, opt_state), permutations.reshape(EPOCHS * MINIBATCHES, -1))
    return params, opt_state


def loss(params: Params, samples: Samples) -> jax.Array:
    def mean(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(samples.valid, x, 0.0)) / jnp.maximum(jnp.sum(samples.valid), 1)

    logits = mlp(params["policy"], samples.observation)
    centred = samples.advantage - mean(samples.advantage)
    advantage = centred / (jnp.sqrt(mean(centred**2)) + 1e-8)
    ratio = jnp.exp(jnp.where(samples.valid, log_prob_of(logits, samples.action) - samples.log_prob, 0.0))
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    entropy = -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), axis=-1)
    value_error = mlp(params["value"], samples.observation)[..., 0] - samples.target
    return -mean(surrogate) + VALUE * mean(0.5 * value_error**2) - ENTROPY * mean(entropy)


def main(seed: int) -> dict[str, Any]:
    """Train until solved or `MAX_STEPS`."""
    pool = envpool.make_gymnasium("CartPole-v1", num_envs=ENVIRONMENTS, seed=seed * ENVIRONMENTS)
    inputs, actions = pool.observation_space.shape[0], pool.action_space.n
    init_rng, act_rng, update_rng = jax.random.split(jax.random.key(seed), 3)
    params, opt_state = init(init_rng, inputs, actions)

    observation, _ = pool.reset()
    over = np.zeros(ENVIRONMENTS, bool)
    running = np.zeros(ENVIRONMENTS)
    returns: collections.deque[float] = collections.deque(maxlen=100)
    steps = calls = updates = 0
    while steps < MAX_STEPS:
        rollout = Rollout(
            np.empty((UNROLL + 1, ENVIRONMENTS, inputs), np.float32),
            np.empty((UNROLL, ENVIRONMENTS), np.int32),
            np.empty((UNROLL, ENVIRONMENTS), np.float32),
            np.empty((UNROLL, ENVIRONMENTS), np.float32),
            np.empty((UNROLL, ENVIRONMENTS), bool),
            np.empty((UNROLL, ENVIRONMENTS), bool),
        )
        for t in range(UNROLL):
            rollout.observation[t] = observation
            action, log_prob = act(params, act_rng, np.uint32(calls), observation)
            rollout.action[t] = action
            rollout.log_prob[t] = log_prob
            calls += 1
            # EnvPool resets on the step after an end, ignoring its action.
            rollout.valid[t] = ~over
            observation, reward, terminated, truncated, _ = pool.step(rollout.action[t])
            rollout.reward[t], rollout.terminated[t] = reward, terminated
            over = terminated | truncated
            running += reward
            returns.extend(running[over])
            running[over] = 0
        rollout.observation[UNROLL] = observation
        steps += int(rollout.valid.sum())
        params, opt_state = update(params, opt_state, jax.random.fold_in(update_rng, updates), rollout)
        updates += 1
        if len(returns) == returns.maxlen and np.mean(returns) >= STOP_AT_RETURN:
            break
    jax.block_until_ready(params)
    pool.close()
    return {"episode_return": float(np.mean(returns)), "environment_steps": steps, "learner_steps": updates}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compilation-cache", type=Path, help="folder where compiled programs are kept between runs")
    options = parser.parse_args()
    if options.compilation_cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(options.compilation_cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    print(json.dumps(main(options.seed)))
