"""DQN (Mnih et al. 2015) with its parts as switches: double, dueling, n-step returns, and exploration spread over the
environments; with `replay.prioritised` and all of them it is Ape-X (Horgan et al. 2018) on one learner."""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from tianji_jax.agent import Fused, Metrics, ReplaySpec
from tianji_jax.distributions import mask_logits
from tianji_jax.types import DiscreteActions, EnvSpec, PyTree, Sample

from . import networks
from .optimizers import OptimizerConfig, make_optimizer


class DQNConfig(OptimizerConfig):
    """Settings of DQN.

    Attributes:
      discount: gamma per environment step.
      n_step: rewards summed before the target network's value.
      reward_clip: rewards are clipped to plus or minus this in the loss; None for no clipping.
      double: the network chooses the action that the target network values (van Hasselt et al. 2016).
      dueling: value and advantages instead of values (Wang et al. 2016).
      huber_delta: errors beyond it count linearly.
      target_period: gradient steps between two updates of the target network.
      target_rate: what the target network takes over of the network then: 1 is all, less is Polyak averaging.
      epsilon_start: chance of a random action at first.
      epsilon_end: at last.
      epsilon_gradient_steps: gradient steps from the first to the last, linearly. There is one for every
        `batch_size / samples_per_insert` environment steps (`replay`).
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
    huber_delta: PositiveFloat = 1.0
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


class DQNState(NamedTuple):
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


class DQN:
    """Values of discrete actions, learned from replay."""

    Config: ClassVar[type[DQNConfig]] = DQNConfig

    def __init__(self, config: DQNConfig, env_spec: EnvSpec) -> None:
        if not isinstance(env_spec.action, DiscreteActions):
            raise ValueError(f"DQN takes one discrete action at a time; {env_spec.name} has {env_spec.action}")
        if config.network.recurrence != "none":
            raise ValueError(
                f"agent.network.recurrence is {config.network.recurrence!r}, but DQN learns from single transitions, "
                "which have no memory: set it to none"
            )
        if config.network.shared_torso is not None:
            raise ValueError("agent.network.shared_torso is for policy and value; DQN has values only: leave it out")
        self.config = config
        self.env_spec = env_spec
        self.replay = ReplaySpec(config.n_step, config.discount, config.reward_clip)
        self.num_actions = env_spec.action.num_values
        self.observation_specs = networks.seen_specs(env_spec, self.num_actions)
        networks.check_fits(config.network, self.observation_specs)
        torsos = tuple((name, networks.torso_of(config.network, s)) for name, s in self.observation_specs.items())
        self.network = networks.QNetwork(config.network, torsos, self.num_actions, config.dueling)
        # The learner may take several gradient steps in a loop.
        self.network_in_loop = self.network.clone(in_loop=True)
        self.optimizer = make_optimizer(config, config.learning_rate)

    def init(self, rng: jax.Array) -> DQNState:
        # One compiled call: op by op the initialisers would compile one by one.
        return jax.jit(self._init)(rng)

    def _init(self, rng: jax.Array) -> DQNState:
        observation = {n: jnp.zeros((1, *s.shape), s.dtype) for n, s in self.observation_specs.items()}
        network = self.network.init(rng, observation, jnp.zeros(1, bool))
        target = jax.tree.map(jnp.copy, network)
        return DQNState(network, target, self.optimizer.init(network), jnp.zeros((), jnp.int32))

    def actor_params(self, train_state: DQNState) -> ActingParams:
        config = self.config
        done = jnp.minimum(train_state.steps / config.epsilon_gradient_steps, 1.0)
        epsilon = config.epsilon_start + (config.epsilon_end - config.epsilon_start) * done
        return ActingParams(train_state.network, jnp.asarray(epsilon, jnp.float32))

    def to_fuse(self, train_state: DQNState) -> Fused:
        # Each group's target network follows its own.
        return Fused(train_state.network)

    def with_fused(self, train_state: DQNState, fused: Fused) -> DQNState:
        return train_state._replace(network=fused.params)

    def initial_state(self, batch_size: int) -> PyTree:
        return ()

    def act(
        self, params: ActingParams, rng: jax.Array, observation: PyTree, is_first: jax.Array, state: PyTree
    ) -> tuple[jax.Array, PyTree, PyTree]:
        explore_rng, action_rng = jax.random.split(rng)
        values = self.values(self.network, params.network, observation)
        # All allowed actions are equally likely, the others impossible.
        anything = jax.random.categorical(action_rng, self._mask(jnp.zeros_like(values), observation))
        explores = jax.random.uniform(explore_rng, is_first.shape) < self.epsilons(params.epsilon, is_first.shape[0])
        action = jnp.where(explores, anything, jnp.argmax(values, axis=-1))
        return action.astype(jnp.int32), {}, state

    def act_greedy(
        self, params: ActingParams, observation: PyTree, is_first: jax.Array, state: PyTree
    ) -> tuple[jax.Array, PyTree]:
        """The actions of highest value."""
        return jnp.argmax(self.values(self.network, params.network, observation), axis=-1).astype(jnp.int32), state

    def epsilons(self, epsilon: jax.Array, count: int) -> jax.Array:
        """The chance of a random action in each of `count` environments, float32 `[count]`."""
        # An exported policy has no number for `count`, which Python's max would need.
        return epsilon ** (1.0 + self.config.epsilon_spread * jnp.arange(count) / jnp.maximum(count - 1, 1))

    def values(self, network: networks.QNetwork, variables: PyTree, observation: PyTree) -> jax.Array:
        """Values of all actions, float32 `[B, actions]`; those of forbidden ones are very low.

        Where nothing is allowed all count as allowed.
        """
        named = networks.named(observation)
        seen = {name: named[name] for name in self.observation_specs}
        batch = jax.tree.leaves(seen)[0].shape[:1]
        values: jax.Array = network.apply(variables, seen, jnp.zeros(batch, bool))  # type: ignore[assignment]
        return self._mask(values, observation)

    def learn(
        self, train_state: DQNState, sample: Sample, rng: jax.Array, axis_name: str
    ) -> tuple[DQNState, Metrics, jax.Array]:
        network, target, opt_state, steps = train_state
        gradient, (metrics, error) = jax.grad(self.loss, has_aux=True)(network, target, sample)
        gradient = jax.lax.pmean(gradient, axis_name)
        updates, opt_state = self.optimizer.update(gradient, opt_state, network)
        network, steps = optax.apply_updates(network, updates), steps + 1
        rate = jnp.where(steps % self.config.target_period == 0, self.config.target_rate, 0.0)
        target = optax.incremental_update(network, target, rate)
        metrics = {**metrics, "gradient_norm": jnp.asarray(optax.tree.norm(gradient))}
        return DQNState(network, target, opt_state, steps), metrics, error

    def loss(self, network: PyTree, target: PyTree, sample: Sample) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
        """Huber loss of one device's sample; metrics, and the temporal differences float32 `[S]`."""
        values = self.values(self.network_in_loop, network, sample.observation)
        value = _of_actions(values, sample.action)
        next_values = self.values(self.network_in_loop, target, sample.next_observation)
        chooser = next_values
        if self.config.double:
            chooser = self.values(self.network_in_loop, network, sample.next_observation)
        next_value = _of_actions(next_values, jnp.argmax(chooser, axis=-1))
        error = value - jax.lax.stop_gradient(sample.reward + sample.discount * next_value)
        loss = jnp.mean(sample.weight * optax.huber_loss(error, delta=self.config.huber_delta))
        return loss, ({"loss": loss, "value_mean": jnp.mean(value)}, error)

    def _mask(self, values: jax.Array, observation: PyTree) -> jax.Array:
        if self.env_spec.action_mask is None:
            return values
        allowed = networks.named(observation)[self.env_spec.action_mask] != 0
        # An episode's last observation may allow nothing, and still be bootstrapped from.
        return mask_logits(values, allowed | ~jnp.any(allowed, axis=-1, keepdims=True))


def _of_actions(values: jax.Array, action: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, action[:, None], axis=-1)[:, 0]
