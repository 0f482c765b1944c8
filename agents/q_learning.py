"""What DQN and R2D2 share: settings, exploration, values of allowed actions, and the target network."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from tianji_jax.agent import Fused, Metrics
from tianji_jax.distributions import mask_logits
from tianji_jax.types import DiscreteActions, EnvSpec, PyTree

from . import networks
from .optimizers import OptimizerConfig, descend, make_optimizer


class QLearningConfig(OptimizerConfig):
    """Settings of all agents that learn the values of discrete actions from replay.

    Attributes:
      discount: gamma per environment step.
      n_step: rewards summed before the target network's value.
      reward_clip: rewards are clipped to plus or minus this in the loss; None for no clipping.
      double: the network chooses the action that the target network values (van Hasselt et al. 2016).
      dueling: value and advantages instead of values (Wang et al. 2016).
      target_period: gradient steps between two updates of the target network.
      target_rate: what the target network takes over of the network then: 1 is all, less is Polyak averaging.
      epsilon_start: chance of a random action at first.
      epsilon_end: at last.
      epsilon_gradient_steps: gradient steps from the first to the last, linearly. There is one for every
        `batch_size / samples_per_insert` environment steps (`replay`), in which R2D2's batch counts by its steps.
      epsilon_spread: environment `i` of `B` that act together has `epsilon ** (1 + epsilon_spread * i / (B - 1))`
        (Horgan et al. 2018, section 4, over actors, where it is 7); 0 gives all the same.
      network: see `NetworkConfig`.
    """

    learning_rate: PositiveFloat = 1e-3
    max_gradient_norm: PositiveFloat | None = 10.0
    discount: float = Field(0.99, ge=0, le=1)
    n_step: PositiveInt = 1
    reward_clip: PositiveFloat | None = None
    double: bool = True
    dueling: bool = False
    target_period: PositiveInt = 200
    target_rate: float = Field(1.0, gt=0, le=1)
    epsilon_start: float = Field(1.0, ge=0, le=1)
    epsilon_end: float = Field(0.05, ge=0, le=1)
    epsilon_gradient_steps: PositiveInt = 1000
    epsilon_spread: NonNegativeFloat = 0.0
    network: networks.NetworkConfig = networks.NetworkConfig()


class ActingParams(NamedTuple):
    """What acting needs.

    Attributes:
      network: Linen variables.
      epsilon: float32 scalar; of the environment that explores most.
    """

    network: PyTree
    epsilon: jax.Array


class QState(NamedTuple):
    """What training needs; the same on every device.

    Attributes:
      network: Linen variables.
      target: those of the target network.
      opt_state: of optax.
      steps: int32 scalar; gradient steps so far.
    """

    network: PyTree
    target: PyTree
    opt_state: PyTree
    steps: jax.Array


class QLearning:
    """Base of agents that value discrete actions; they add `Config`, `replay` and `learn`."""

    Config: ClassVar[type[QLearningConfig]]

    def __init__(self, config: QLearningConfig, env_spec: EnvSpec, quantiles: int = 1) -> None:
        """
        Args:
          config: of the agent.
          env_spec: of the environment.
          quantiles: of the return that the network learns for each action, whose mean is its value.
        """
        name = type(self).__name__
        if not isinstance(env_spec.action, DiscreteActions):
            raise ValueError(f"{name} takes one discrete action at a time; {env_spec.name} has {env_spec.action}")
        if config.network.shared_torso is not None:
            raise ValueError(
                f"agent.network.shared_torso is for policy and value; {name} has values only: leave it out"
            )
        self.config = config
        self.env_spec = env_spec
        self.num_actions = env_spec.action.num_values
        self.observation_specs = networks.seen_specs(env_spec, self.num_actions)
        networks.check_fits(config.network, self.observation_specs)
        torsos = networks.torsos_of(config.network, self.observation_specs)
        self.network = networks.QNetwork(config.network, torsos, self.num_actions, config.dueling, quantiles)
        # The learner may take several gradient steps in a loop.
        self.network_in_loop = self.network.clone(in_loop=True)
        self.optimizer = make_optimizer(config, config.learning_rate)

    def init(self, rng: jax.Array) -> QState:
        # One compiled call: op by op the initialisers would compile one by one.
        return jax.jit(self._init)(rng)

    def _init(self, rng: jax.Array) -> QState:
        observation = {n: jnp.zeros((1, *s.shape), s.dtype) for n, s in self.observation_specs.items()}
        network = self.network.init(rng, observation, jnp.zeros(1, bool), self.initial_state(1))
        target = jax.tree.map(jnp.copy, network)
        return QState(network, target, self.optimizer.init(network), jnp.zeros((), jnp.int32))

    def actor_params(self, train_state: QState) -> ActingParams:
        config = self.config
        done = jnp.minimum(train_state.steps / config.epsilon_gradient_steps, 1.0)
        epsilon = config.epsilon_start + (config.epsilon_end - config.epsilon_start) * done
        return ActingParams(train_state.network, jnp.asarray(epsilon, jnp.float32))

    def to_fuse(self, train_state: QState) -> Fused:
        # Each group's target network follows its own.
        return Fused(train_state.network)

    def with_fused(self, train_state: QState, fused: Fused) -> QState:
        return train_state._replace(network=fused.params)

    def initial_state(self, batch_size: int) -> PyTree:
        return networks.initial_state(self.config.network, True, batch_size)

    def act(
        self, params: ActingParams, rng: jax.Array, observation: PyTree, is_first: jax.Array, state: PyTree
    ) -> tuple[jax.Array, PyTree, PyTree]:
        explore_rng, action_rng = jax.random.split(rng)
        values, state = self.values(self.network, params.network, observation, is_first, state)
        # All allowed actions are equally likely, the others impossible.
        anything = jax.random.categorical(action_rng, self._mask(jnp.zeros_like(values), observation))
        explores = jax.random.uniform(explore_rng, is_first.shape) < self.epsilons(params.epsilon, is_first.shape[0])
        action = jnp.where(explores, anything, jnp.argmax(values, axis=-1))
        return action.astype(jnp.int32), {}, state

    def act_greedy(
        self, params: ActingParams, observation: PyTree, is_first: jax.Array, state: PyTree
    ) -> tuple[jax.Array, PyTree]:
        """The actions of highest value."""
        values, state = self.values(self.network, params.network, observation, is_first, state)
        return jnp.argmax(values, axis=-1).astype(jnp.int32), state

    def epsilons(self, epsilon: jax.Array, count: int) -> jax.Array:
        """The chance of a random action in each of `count` environments, float32 `[count]`."""
        # An exported policy has no number for `count`, which Python's max would need.
        return epsilon ** (1.0 + self.config.epsilon_spread * jnp.arange(count) / jnp.maximum(count - 1, 1))

    def values(
        self, network: networks.QNetwork, variables: PyTree, observation: PyTree, is_first: jax.Array, state: PyTree
    ) -> tuple[jax.Array, PyTree]:
        """Values of all actions, float32 `[..., actions]`, and the next recurrent state.

        Those of forbidden actions are very low; where nothing is allowed all count as allowed.

        Args:
          network: `network`, or `network_in_loop` in the learner.
          variables: of it.
          observation: pytree of `[B, ...]`, or `[T, B, ...]`.
          is_first: bool `[B]`, or `[T, B]`.
          state: recurrent state before the first step; `()` where there is no core.
        """
        quantiles, state = self.quantiles(network, variables, observation, is_first, state)
        return self._mask(jnp.mean(quantiles, axis=-1), observation), state

    def quantiles(
        self, network: networks.QNetwork, variables: PyTree, observation: PyTree, is_first: jax.Array, state: PyTree
    ) -> tuple[jax.Array, PyTree]:
        """As `values`, the quantiles of the returns of all actions, allowed or not: float32 `[..., actions, Q]`."""
        seen = networks.seen(observation, self.observation_specs)
        quantiles, state = network.apply(variables, seen, is_first, state)
        return quantiles, state

    def improve(
        self, train_state: QState, loss: Callable[[PyTree], tuple[jax.Array, Any]], axis_name: str
    ) -> tuple[QState, Metrics, Any]:
        """One gradient step; the new state, the loss and norm of the gradient, and what the loss returns besides.

        Args:
          train_state: the same on every device.
          loss: of the network's variables; scalar, its mean over devices is what is descended.
          axis_name: the axis to average over.
        """
        network, target, opt_state, steps = train_state
        (lost, more), gradient = jax.value_and_grad(loss, has_aux=True)(network)
        network, opt_state, norm = descend(self.optimizer, network, opt_state, gradient, axis_name)
        steps += 1
        rate = jnp.where(steps % self.config.target_period == 0, self.config.target_rate, 0.0)
        target = optax.incremental_update(network, target, rate)
        return QState(network, target, opt_state, steps), {"loss": lost, "gradient_norm": norm}, more

    def _mask(self, values: jax.Array, observation: PyTree) -> jax.Array:
        if self.env_spec.action_mask is None:
            return values
        allowed = networks.named(observation)[self.env_spec.action_mask] != 0
        # An episode's last observation may allow nothing, and still be bootstrapped from.
        return mask_logits(values, allowed | ~jnp.any(allowed, axis=-1, keepdims=True))


def of_actions(values: jax.Array, action: jax.Array) -> jax.Array:
    """Those of the actions taken, `[...]` or `[..., Q]`.

    Args:
      values: of all actions, `[..., actions]` or `[..., actions, Q]`.
      action: int32 `[...]`.
    """
    taken = action.reshape(*action.shape, *(1,) * (values.ndim - action.ndim))
    return jnp.squeeze(jnp.take_along_axis(values, taken, axis=action.ndim), axis=action.ndim)
