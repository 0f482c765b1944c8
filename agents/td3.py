"""TD3 (Fujimoto et al. 2018), and DDPG (Lillicrap et al. 2016), which is TD3 without its three additions."""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from pydantic import NonNegativeFloat, PositiveInt

from tianji_jax.agent import Metrics
from tianji_jax.types import EnvSpec, PyTree, Sample

from .control import Control, ControlConfig
from .optimizers import descend


class TD3Config(ControlConfig):
    """Settings of TD3 and DDPG. Noise is in units of actions scaled to -1 to 1.

    Attributes:
      exploration_noise: standard deviation of what is added to actions in acting.
      twin: two critics, of which targets take the smaller value.
      policy_delay: gradient steps of the critics for one of the policy and of the target networks.
      target_noise: standard deviation of what is added to the target policy's actions.
      target_noise_clip: that noise is clipped to plus or minus this.
    """

    exploration_noise: NonNegativeFloat = 0.1
    twin: bool = True
    policy_delay: PositiveInt = 2
    target_noise: NonNegativeFloat = 0.2
    target_noise_clip: NonNegativeFloat = 0.5


class DDPGConfig(TD3Config):
    """Settings of DDPG: those of TD3, with its additions switched off."""

    twin: bool = False
    policy_delay: PositiveInt = 1
    target_noise: NonNegativeFloat = 0.0


class TD3State(NamedTuple):
    """What training needs; the same on every device.

    Attributes:
      policy: Linen variables.
      critics: those of all critics, leaves `[C, ...]`.
      policy_target: those of the policy's target.
      critics_target: those of the critics' targets.
      policy_opt: of optax; so is the next.
      critic_opt: for all critics.
      steps: int32 scalar; gradient steps of the critics so far.
      policy_metrics: of the policy's last gradient step.
    """

    policy: PyTree
    critics: PyTree
    policy_target: PyTree
    critics_target: PyTree
    policy_opt: PyTree
    critic_opt: PyTree
    steps: jax.Array
    policy_metrics: Metrics


class TD3(Control):
    """A deterministic policy that climbs the first critic's value."""

    Config: ClassVar[type[TD3Config]] = TD3Config
    config: TD3Config

    def __init__(self, config: TD3Config, env_spec: EnvSpec) -> None:
        super().__init__(config, env_spec, num_parameters=1, num_critics=2 if config.twin else 1)

    def _init(self, rng: jax.Array) -> TD3State:
        policy, critics = self._init_networks(rng)
        return TD3State(
            policy,
            critics,
            jax.tree.map(jnp.copy, policy),
            jax.tree.map(jnp.copy, critics),
            self.policy_optimizer.init(policy),
            self.critic_optimizer.init(critics),
            jnp.zeros((), jnp.int32),
            {"policy_loss": jnp.zeros(()), "policy_gradient_norm": jnp.zeros(())},
        )

    def explore(self, parameters: jax.Array, rng: jax.Array) -> jax.Array:
        noise = self.config.exploration_noise * jax.random.normal(rng, parameters.shape)
        return jnp.clip(self.mode(parameters) + noise, -1.0, 1.0)

    def mode(self, parameters: jax.Array) -> jax.Array:
        return jnp.tanh(parameters)

    def learn(
        self, train_state: TD3State, sample: Sample, rng: jax.Array, axis_name: str
    ) -> tuple[TD3State, Metrics, jax.Array]:
        state, config = train_state, self.config
        next_action = self.mode(self.parameters(self.policy_in_loop, state.policy_target, sample.next_observation))
        noise = config.target_noise * jax.random.normal(rng, next_action.shape)
        noise = jnp.clip(noise, -config.target_noise_clip, config.target_noise_clip)
        next_action = jnp.clip(next_action + noise, -1.0, 1.0)
        next_value = jnp.min(self.values(state.critics_target, sample.next_observation, next_action), axis=0)
        critics, critic_opt, metrics, error = self.improve_critics(
            state.critics, state.critic_opt, sample, next_value, axis_name
        )
        state = state._replace(critics=critics, critic_opt=critic_opt, steps=state.steps + 1)
        if config.policy_delay == 1:
            state = self._improve_policy(state, sample, axis_name)
        else:
            # All devices are at the same step, so that all or none average their gradients.
            state = jax.lax.cond(
                state.steps % config.policy_delay == 0,
                lambda state: self._improve_policy(state, sample, axis_name),
                lambda state: state,
                state,
            )
        return state, metrics | state.policy_metrics, error

    def _improve_policy(self, state: TD3State, sample: Sample, axis_name: str) -> TD3State:
        """One gradient step of the policy, and one of all targets towards their networks."""
        lost, gradient = jax.value_and_grad(self.policy_loss)(state.policy, state.critics, sample)
        policy, policy_opt, norm = descend(self.policy_optimizer, state.policy, state.policy_opt, gradient, axis_name)
        policy_target, critics_target = jax.tree.map(
            lambda old, new: old + self.config.target_rate * (new - old),
            (state.policy_target, state.critics_target),
            (policy, state.critics),
        )
        return state._replace(
            policy=policy,
            policy_opt=policy_opt,
            policy_target=policy_target,
            critics_target=critics_target,
            # Part of the state, which has to be the same on all devices.
            policy_metrics={"policy_loss": jax.lax.pmean(lost, axis_name), "policy_gradient_norm": norm},
        )

    def policy_loss(self, policy: PyTree, critics: PyTree, sample: Sample) -> jax.Array:
        """Minus the first critic's value of the policy's actions, averaged over one device's sample."""
        action = self.mode(self.parameters(self.policy_in_loop, policy, sample.observation))
        first = jax.tree.map(lambda x: x[:1], critics)
        return -jnp.mean(self.values(first, sample.observation, action))


class DDPG(TD3):
    """TD3 with other defaults."""

    Config: ClassVar[type[TD3Config]] = DDPGConfig
