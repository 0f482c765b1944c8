"""What SAC, TD3 and DDPG share: settings, bounds, critics, and the first random actions.

Inside an agent actions are from -1 to 1 in every entry, whatever the environment's bounds are: networks, noise and
densities are in these units, and `to_box` and `from_box` are the way out and back.
"""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt

from tianji_jax.agent import Fused, Metrics, ReplaySpec
from tianji_jax.types import ContinuousActions, EnvSpec, PyTree, Sample

from . import networks
from .control_networks import ControlNetworkConfig, CriticNetwork, PolicyNetwork
from .optimizers import OptimizerConfig, descend, make_optimizer


class ControlConfig(OptimizerConfig):
    """Settings of all agents for continuous control from replay.

    Attributes:
      learning_rate: of the policy.
      critic_learning_rate: of the critics; None for that of the policy.
      max_gradient_norm: gradients of the policy, and those of the critics, are scaled down to this global norm; None
        for no limit.
      discount: gamma per environment step.
      n_step: rewards summed before the target network's value.
      reward_clip: rewards are clipped to plus or minus this in the loss; None for no clipping.
      target_rate: what a target network takes over of its network each time (Polyak averaging).
      random_start: actions are uniformly random until the first gradient step, which `replay.min_size` environment
        steps come before.
      network: see `ControlNetworkConfig`.
    """

    learning_rate: PositiveFloat = 3e-4
    critic_learning_rate: PositiveFloat | None = None
    max_gradient_norm: PositiveFloat | None = None
    discount: float = Field(0.99, ge=0, le=1)
    n_step: PositiveInt = 1
    reward_clip: PositiveFloat | None = None
    target_rate: float = Field(0.005, gt=0, le=1)
    random_start: bool = True
    network: ControlNetworkConfig = ControlNetworkConfig()


class ActingParams(NamedTuple):
    """What acting needs.

    Attributes:
      policy: Linen variables.
      random: bool scalar; whether nothing has been learned yet, and actions are random.
    """

    policy: PyTree
    random: jax.Array


class Control:
    """Base of agents with a policy and critics; they add `Config`, `explore`, `mode`, `_init` and `learn`.

    Their training state has `policy`, Linen variables, and `steps`, the int32 number of gradient steps.
    """

    Config: ClassVar[type[ControlConfig]]

    def __init__(self, config: ControlConfig, env_spec: EnvSpec, num_parameters: int, num_critics: int) -> None:
        """
        Args:
          config: of the agent.
          env_spec: of the environment.
          num_parameters: outputs of the policy for each entry of an action.
          num_critics: how many.
        """
        self.low, self.high = _bounds(type(self).__name__, env_spec)
        if config.network.recurrence != "none":
            raise ValueError(
                f"agent.network.recurrence is {config.network.recurrence!r}, but {type(self).__name__} learns from "
                "single transitions, which have no memory: set it to none"
            )
        if config.network.shared_torso:
            raise ValueError(
                f"agent.network.shared_torso is true, but policy and critics of {type(self).__name__} are networks of "
                "their own: leave it out"
            )
        self.config = config
        self.env_spec = env_spec
        self.replay = ReplaySpec(config.n_step, config.discount, config.reward_clip)
        self.num_actions = len(self.low)
        self.num_critics = num_critics
        self.observation_specs = networks.seen_specs(env_spec, self.num_actions)
        networks.check_fits(config.network, self.observation_specs)
        torsos = networks.torsos_of(config.network, self.observation_specs)
        self.policy = PolicyNetwork(config.network, torsos, num_parameters * self.num_actions)
        # The learner may take several gradient steps in a loop.
        self.policy_in_loop = self.policy.clone(in_loop=True)
        self.critic = CriticNetwork(config.network, torsos, in_loop=True)
        self.policy_optimizer = make_optimizer(config, config.learning_rate)
        self.critic_optimizer = make_optimizer(config, config.critic_learning_rate or config.learning_rate)

    def init(self, rng: jax.Array) -> Any:
        # One compiled call: op by op the initialisers would compile one by one.
        return jax.jit(self._init)(rng)

    def _init(self, rng: jax.Array) -> Any:
        raise NotImplementedError

    def _init_networks(self, rng: jax.Array) -> tuple[PyTree, PyTree]:
        """Variables of the policy, and of all critics with a leading dimension `C`."""
        policy_rng, critic_rng = jax.random.split(rng)
        observation = {n: jnp.zeros((1, *s.shape), s.dtype) for n, s in self.observation_specs.items()}
        policy = self.policy.init(policy_rng, observation, jnp.zeros(1, bool))
        action = jnp.zeros((1, self.num_actions))
        rngs = jax.random.split(critic_rng, self.num_critics)
        return policy, jax.vmap(lambda rng: self.critic.init(rng, observation, action))(rngs)

    def actor_params(self, train_state: Any) -> ActingParams:
        random = train_state.steps == 0 if self.config.random_start else jnp.zeros((), bool)
        return ActingParams(train_state.policy, random)

    def to_fuse(self, train_state: Any) -> Fused:
        # Each group's targets follow its own networks.
        return Fused((train_state.policy, train_state.critics))

    def with_fused(self, train_state: Any, fused: Fused) -> Any:
        policy, critics = fused.params
        return train_state._replace(policy=policy, critics=critics)

    def initial_state(self, batch_size: int) -> PyTree:
        return ()

    def act(
        self, params: ActingParams, rng: jax.Array, observation: PyTree, is_first: jax.Array, state: PyTree
    ) -> tuple[jax.Array, PyTree, PyTree]:
        explore_rng, random_rng = jax.random.split(rng)
        action = self.explore(self.parameters(self.policy, params.policy, observation), explore_rng)
        anything = jax.random.uniform(random_rng, action.shape, minval=-1.0, maxval=1.0)
        return self.to_box(jnp.where(params.random, anything, action)), {}, state

    def act_greedy(
        self, params: ActingParams, observation: PyTree, is_first: jax.Array, state: PyTree
    ) -> tuple[jax.Array, PyTree]:
        """The policy's actions without noise."""
        return self.to_box(self.mode(self.parameters(self.policy, params.policy, observation))), state

    def explore(self, parameters: jax.Array, rng: jax.Array) -> jax.Array:
        """Actions from -1 to 1, `[B, A]`, that find something out; from the policy's parameters."""
        raise NotImplementedError

    def mode(self, parameters: jax.Array) -> jax.Array:
        """The policy's actions from -1 to 1, `[B, A]`; from its parameters."""
        raise NotImplementedError

    def to_box(self, action: jax.Array) -> jax.Array:
        """What the environment takes: within its bounds, float32 `[..., A]`."""
        middle, half = self._middle_and_half()
        # Clipped because float32 rounding may step over a bound.
        return jnp.clip(middle + half * action, self.low, self.high)

    def from_box(self, action: jax.Array) -> jax.Array:
        """Actions from -1 to 1 of the environment's, float32 `[..., A]`."""
        middle, half = self._middle_and_half()
        return (action - middle) / half

    def _middle_and_half(self) -> tuple[np.ndarray, np.ndarray]:
        low, high = self.low.astype(np.float64), self.high.astype(np.float64)
        return ((high + low) / 2).astype(np.float32), ((high - low) / 2).astype(np.float32)

    def parameters(self, network: PolicyNetwork, policy: PyTree, observation: PyTree) -> jax.Array:
        """The policy's outputs, float32 `[B, num_parameters]`."""
        seen = networks.seen(observation, self.observation_specs)
        batch = jax.tree.leaves(seen)[0].shape[:1]
        parameters: jax.Array = network.apply(policy, seen, jnp.zeros(batch, bool))  # type: ignore[assignment]
        return parameters

    def values(self, critics: PyTree, observation: PyTree, action: jax.Array) -> jax.Array:
        """What all critics say of actions from -1 to 1, float32 `[C, B]`."""
        seen = networks.seen(observation, self.observation_specs)
        values: jax.Array = jax.vmap(lambda critic: self.critic.apply(critic, seen, action))(critics)  # type: ignore[assignment]
        return values

    def improve_critics(
        self, critics: PyTree, opt_state: PyTree, sample: Sample, next_value: jax.Array, axis_name: str
    ) -> tuple[PyTree, PyTree, Metrics, jax.Array]:
        """One gradient step of all critics towards `reward + discount * next_value`.

        The loss is half the squared error, summed over critics, weighted and averaged over the sample.

        Args:
          critics: their variables.
          opt_state: of their optimiser.
          sample: this device's.
          next_value: float32 `[S]`, of the next observation.
          axis_name: the axis of the devices.

        Returns:
          Critics, state of the optimiser, metrics, and each transition's mean absolute error float32 `[S]`.
        """
        target = jax.lax.stop_gradient(sample.reward + sample.discount * next_value)
        action = self.from_box(sample.action)

        def loss(critics: PyTree) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            value = self.values(critics, sample.observation, action)
            error = value - target
            return 0.5 * jnp.mean(sample.weight * jnp.sum(error**2, axis=0)), (value, error)

        (lost, (value, error)), gradient = jax.value_and_grad(loss, has_aux=True)(critics)
        critics, opt_state, norm = descend(self.critic_optimizer, critics, opt_state, gradient, axis_name)
        metrics = {"loss": lost, "value_mean": jnp.mean(value), "gradient_norm": norm}
        return critics, opt_state, metrics, jnp.mean(jnp.abs(error), axis=0)


def _bounds(agent: str, env_spec: EnvSpec) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of the actions, float32 `[A]` each.

    Raises:
      ValueError: actions are not continuous, or an entry has no bounds to scale by.
    """
    if not isinstance(env_spec.action, ContinuousActions):
        raise ValueError(f"{agent} takes continuous actions; {env_spec.name} has {env_spec.action}")
    low, high = (np.asarray(bound, np.float32) for bound in (env_spec.action.low, env_spec.action.high))
    if not np.all(np.isfinite([low, high])):
        raise ValueError(
            f"{agent} needs actions bounded on both sides; {env_spec.name} has low={env_spec.action.low}, "
            f"high={env_spec.action.high}: give it bounds in a wrapper, or take an agent that does without (ppo)"
        )
    if not np.all(low < high):
        raise ValueError(
            f"{agent} needs a lower bound below the upper one in each entry of an action; {env_spec.name} has "
            f"low={env_spec.action.low}, high={env_spec.action.high}"
        )
    return low, high
