"""For the tests of SAC, TD3 and DDPG: samples, gradient steps on virtual devices, and the networks in NumPy."""

import functools
from typing import Any

import jax
import numpy as np
from helpers import IMAGE, SPECS, random_observation

from tianji_jax.agents.control import Control
from tianji_jax.agents.control_networks import ControlNetworkConfig
from tianji_jax.parallel import Parallel, Places, spec_of
from tianji_jax.types import ArraySpec, ContinuousActions, EnvSpec, Sample

S = 8
RATE = 0.1
SGD = {"optimizer": "sgd", "learning_rate": RATE, "critic_learning_rate": RATE}
SMALL: dict[str, Any] = {"network": ControlNetworkConfig(hidden_sizes=(5, 4), activation="tanh")}
SEEN = {"image": IMAGE, "vector": ArraySpec((3,), np.float32)}
BOX = SPECS["continuous"].action
WITH_IMAGES = EnvSpec("images", SEEN, BOX)


def bounded(low: tuple[float, ...], high: tuple[float, ...]) -> EnvSpec:
    return EnvSpec("bounded", ArraySpec((4,), np.float32), ContinuousActions(low, high))


def make(agent: type[Control], spec: EnvSpec = SPECS["continuous"], **settings: Any) -> Any:
    cls: Any = agent
    return cls(agent.Config(**{**SMALL, **settings}), spec)


def random_sample(agent: Control, seed: int = 0, size: int = S) -> Sample:
    rng = np.random.default_rng(seed)
    observation, after = (random_observation(agent.env_spec.observation, (size,), rng) for _ in range(2))
    return Sample(
        observation=observation,
        action=rng.uniform(agent.low, agent.high, (size, agent.num_actions)).astype(np.float32),
        reward=(3 * rng.normal(size=size)).astype(np.float32),
        discount=np.where(rng.random(size) < 0.3, 0.0, 0.9).astype(np.float32),
        next_observation=after,
        weight=rng.random(size).astype(np.float32),
        age=np.zeros(size, np.int32),
    )


def learn(agent: Any, state: Any, sample: Sample, devices: int = 1, mode: Any = "pmap") -> tuple[Any, Any, Any]:
    """One gradient step, the sample dealt to the devices: state, metrics, and priorities `[S]`; NumPy arrays."""
    parallel, compiled = _step(agent, devices, mode)
    shards = [jax.tree.map(lambda x, i=i: np.split(x, devices)[i], sample) for i in range(devices)]
    after, metrics, priority = jax.device_get(compiled(parallel.replicate(state), parallel.shard(shards)))
    return after, metrics, priority.reshape(-1)


@functools.cache
def _step(agent: Any, devices: int, mode: Any) -> Any:
    parallel = Parallel(jax.devices()[:devices], mode)

    def step(state: Any, sample: Sample) -> Any:
        state, metrics, priority = agent.learn(state, sample, jax.random.key(0), "data")
        return state, jax.lax.pmean(metrics, "data"), priority

    state = parallel.spec(jax.eval_shape(agent.init, jax.random.key(0)))
    places = Places((False, True), (False, False, True), ())
    return parallel, parallel.lower(
        step, state, spec_of(random_sample(agent, size=S // devices)), places=places
    ).compile()


def some_state(agent: Any, scale: float = 0.5) -> Any:
    """Before any gradient step, with networks of which no two are alike and no head is almost zero."""
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(agent.init, jax.random.key(0)))
    names = [name for name in state._fields if name.startswith(("policy", "critics", "target"))]
    names = [name for name in names if name not in ("policy_opt", "policy_metrics")]
    return state._replace(**{name: _random(getattr(state, name), seed, scale) for seed, name in enumerate(names)})


def _random(tree: Any, seed: int, scale: float) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: (scale * rng.normal(size=x.shape)).astype(np.float32), tree)


def policy_outputs(policy: Any, observation: np.ndarray) -> np.ndarray:
    """One row at a time, from the weights, float64."""
    params, rows = policy["params"], []
    for x in np.asarray(observation, np.float64):
        for layer in ("Dense_0", "Dense_1"):
            x = np.tanh(params["trunk"][layer]["kernel"].T @ x + params["trunk"][layer]["bias"])
        rows.append(params["head"]["kernel"].T @ x + params["head"]["bias"])
    return np.array(rows)


def critic_values(critics: Any, which: int, observation: np.ndarray, action: np.ndarray) -> np.ndarray:
    """Of actions from -1 to 1, one row at a time, from the weights of one critic, float64."""
    params, values = jax.tree.map(lambda x: np.asarray(x[which], np.float64), critics["params"]), []
    for seen, chosen in zip(np.asarray(observation, np.float64), action, strict=True):
        x = np.array([*seen, *chosen])
        for layer in ("Dense_0", "Dense_1"):
            x = np.tanh(params[layer]["kernel"].T @ x + params[layer]["bias"])
        values.append(params["head"]["kernel"][:, 0] @ x + params["head"]["bias"][0])
    return np.array(values)


def scaled(action: np.ndarray) -> np.ndarray:
    """The specs' actions, from -1 to 1: their bounds are -1 to 1 and 0 to 5."""
    return np.stack([action[:, 0], action[:, 1] / 2.5 - 1], axis=-1).astype(np.float64)


def with_head_bias(network: Any, bias: np.ndarray) -> Any:
    return {"params": {**network["params"], "head": {**network["params"]["head"], "bias": bias}}}
