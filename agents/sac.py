"""SAC: soft actor-critic with twin critics and a learned temperature (Haarnoja et al. 2018b, arXiv 1812.05905)."""

import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from pydantic import PositiveFloat

from tianji_jax.agent import Metrics
from tianji_jax.distributions import TanhGaussian
from tianji_jax.types import EnvSpec, PyTree, Sample

from .control import Control, ControlConfig
from .optimizers import descend, make_optimizer

LOG_STD_RANGE = (-5.0, 2.0)
"""Of the Gaussian before tanh. Far below, float32 could not tell its samples from its mean."""


class SACConfig(ControlConfig):
    """Settings of SAC.

    Attributes:
      temperature: alpha, the weight of the entropy, at first.
      learn_temperature: alpha is adjusted to keep the entropy at `target_entropy`; it stays as it is otherwise.
      temperature_learning_rate: of log alpha; None for that of the policy.
      target_entropy: in nats, of actions scaled to -1 to 1, where the largest is 0.69 for each entry; None for minus
        the number of entries.
    """

    temperature: PositiveFloat = 1.0
    learn_temperature: bool = True
    temperature_learning_rate: PositiveFloat | None = None
    target_entropy: float | None = None


class SACState(NamedTuple):
    """What training needs; the same on every device.

    Attributes:
      policy: Linen variables.
      critics: those of the twin critics, leaves `[2, ...]`.
      target: those of their targets.
      log_temperature: float32 scalar.
      policy_opt: of optax; so are the next two.
      critic_opt: for both critics.
      temperature_opt: for `log_temperature`.
      steps: int32 scalar; gradient steps so far.
    """

    policy: PyTree
    critics: PyTree
    target: PyTree
    log_temperature: jax.Array
    policy_opt: PyTree
    critic_opt: PyTree
    temperature_opt: PyTree
    steps: jax.Array


class SAC(Control):
    """A stochastic policy that is rewarded for its entropy."""

    Config: ClassVar[type[SACConfig]] = SACConfig
    config: SACConfig

    def __init__(self, config: SACConfig, env_spec: EnvSpec) -> None:
        super().__init__(config, env_spec, num_parameters=2, num_critics=2)
        self.distribution = TanhGaussian((-1.0,) * self.num_actions, (1.0,) * self.num_actions)
        self.target_entropy = -float(self.num_actions) if config.target_entropy is None else config.target_entropy
        self.temperature_optimizer = make_optimizer(config, config.temperature_learning_rate or config.learning_rate)

    def _init(self, rng: jax.Array) -> SACState:
        policy, critics = self._init_networks(rng)
        log_temperature = jnp.asarray(math.log(self.config.temperature), jnp.float32)
        return SACState(
            policy,
            critics,
            jax.tree.map(jnp.copy, critics),
            log_temperature,
            self.policy_optimizer.init(policy),
            self.critic_optimizer.init(critics),
            self.temperature_optimizer.init(log_temperature),
            jnp.zeros((), jnp.int32),
        )

    def explore(self, parameters: jax.Array, rng: jax.Array) -> jax.Array:
        parameters = _within_range(parameters)
        return self.distribution.to_action(self.distribution.sample(parameters, rng))

    def mode(self, parameters: jax.Array) -> jax.Array:
        return self.distribution.to_action(self.distribution.mode(parameters))

    def sample(self, policy: PyTree, observation: PyTree, rng: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Actions from -1 to 1 `[S, A]`, differentiable in the policy, and their log-densities float32 `[S]`."""
        parameters = _within_range(self.parameters(self.policy_in_loop, policy, observation))
        raw = self.distribution.sample(parameters, rng)
        return self.distribution.to_action(raw), self.distribution.log_prob(parameters, raw)

    def learn(
        self, train_state: SACState, sample: Sample, rng: jax.Array, axis_name: str
    ) -> tuple[SACState, Metrics, jax.Array]:
        policy, critics, target, log_temperature, policy_opt, critic_opt, temperature_opt, steps = train_state
        next_rng, rng = jax.random.split(rng)
        temperature = jnp.exp(log_temperature)

        next_action, next_log_prob = self.sample(policy, sample.next_observation, next_rng)
        next_value = jnp.min(self.values(target, sample.next_observation, next_action), axis=0)
        soft_value = next_value - temperature * next_log_prob  # equation 3
        critics, critic_opt, metrics, error = self.improve_critics(critics, critic_opt, sample, soft_value, axis_name)

        policy_loss = jax.value_and_grad(self.policy_loss, has_aux=True)
        (lost, entropy), gradient = policy_loss(policy, critics, temperature, sample, rng)
        policy, policy_opt, policy_norm = descend(self.policy_optimizer, policy, policy_opt, gradient, axis_name)

        if self.config.learn_temperature:
            # Of alpha * (entropy - target), equation 18, by log alpha.
            slope = temperature * (entropy - self.target_entropy)
            log_temperature, temperature_opt, _ = descend(
                self.temperature_optimizer, log_temperature, temperature_opt, slope, axis_name
            )
        target = jax.tree.map(lambda old, new: old + self.config.target_rate * (new - old), target, critics)
        metrics |= {
            "policy_loss": lost,
            "policy_gradient_norm": policy_norm,
            "entropy": entropy,
            "temperature": temperature,
        }
        after = SACState(policy, critics, target, log_temperature, policy_opt, critic_opt, temperature_opt, steps + 1)
        return after, metrics, error

    def policy_loss(
        self, policy: PyTree, critics: PyTree, temperature: jax.Array, sample: Sample, rng: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Equation 9 with the smaller of both values, averaged over one device's sample; and the entropy."""
        action, log_prob = self.sample(policy, sample.observation, rng)
        value = jnp.min(self.values(critics, sample.observation, action), axis=0)
        return jnp.mean(temperature * log_prob - value), -jnp.mean(log_prob)


def _within_range(parameters: jax.Array) -> jax.Array:
    mean, log_std = jnp.split(parameters, 2, axis=-1)
    return jnp.concatenate([mean, jnp.clip(log_std, *LOG_STD_RANGE)], axis=-1)
