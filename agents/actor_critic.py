"""What IMPALA and PPO share: settings, training state, acting, and the unroll the loss looks at."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from tianji_jax import normalisation
from tianji_jax.agent import Fused
from tianji_jax.distributions import distribution, mask_logits
from tianji_jax.normalisation import RewardScale, RunningStatistics
from tianji_jax.returns import Steps, gae
from tianji_jax.types import Batch, ContinuousActions, EnvSpec, PyTree

from . import networks
from .optimizers import OptimizerConfig, make_optimizer


class ActorCriticConfig(OptimizerConfig):
    """Settings of all actor-critic agents.

    Attributes:
      learning_rate: at the start.
      learning_rate_schedule: `constant`, or down to zero by `linear` or `cosine` within `schedule_learner_steps`.
      schedule_learner_steps: learner updates (not gradient steps, not environment steps) until the learning rate is
        zero. The agent does not know how long the run is: give it total steps / (unroll_length x environments of one
        batch).
      discount: gamma per environment step.
      trace_lambda: lambda of GAE and V-trace.
      entropy_coefficient: weight of the entropy bonus in the loss.
      value_coefficient: weight of the value loss in the loss.
      reward_clip: rewards are clipped to plus or minus this in the loss; None for no clipping.
      normalise_observations: by running mean and variance of each entry; not for images.
      normalise_rewards: divides rewards by the scale of discounted returns (`normalisation.RewardScale`).
      squash: for continuous actions, a tanh-squashed Gaussian in place of a clipped one.
      network: see `NetworkConfig`.
    """

    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    schedule_learner_steps: PositiveInt | None = None
    discount: float = Field(0.99, ge=0, le=1)
    trace_lambda: float = Field(0.95, ge=0, le=1)
    entropy_coefficient: NonNegativeFloat = 0.01
    value_coefficient: NonNegativeFloat = 0.5
    reward_clip: PositiveFloat | None = None
    normalise_observations: bool = False
    normalise_rewards: bool = False
    squash: bool = False
    network: networks.NetworkConfig = networks.NetworkConfig()

    @model_validator(mode="after")
    def _schedule_has_a_length(self) -> "ActorCriticConfig":
        if self.learning_rate_schedule != "constant" and self.schedule_learner_steps is None:
            raise ValueError(
                f"learning_rate_schedule {self.learning_rate_schedule!r} needs schedule_learner_steps, the number of"
                " learner updates until the learning rate is zero"
            )
        return self


class ActorParams(NamedTuple):
    """What acting needs.

    Attributes:
      network: Linen variables.
      observation_statistics: by name of the observation; empty when observations are not normalised.
    """

    network: PyTree
    observation_statistics: dict[str, RunningStatistics]


class ActorCriticState(NamedTuple):
    """What training needs; the same on every device.

    Attributes:
      params: what the actors get.
      opt_state: of optax.
      reward_scale: None when rewards are not normalised.
    """

    params: ActorParams
    opt_state: PyTree
    reward_scale: RewardScale | None


class Unroll(NamedTuple):
    """The current policy's view of a batch.

    Attributes:
      value: float32 `[T + 1, b]`.
      log_prob: float32 `[T, b]`, of the actions taken.
      entropy: float32 `[T, b]`.
    """

    value: jax.Array
    log_prob: jax.Array
    entropy: jax.Array


class ActorCritic:
    """Base of agents with a policy and a value on one network; they add `Config` and `update`."""

    Config: ClassVar[type[ActorCriticConfig]]

    def __init__(self, config: ActorCriticConfig, env_spec: EnvSpec) -> None:
        self.config = config
        self.env_spec = env_spec
        self.distribution = distribution(env_spec.action, config.squash)
        self.keeps_raw_action = isinstance(env_spec.action, ContinuousActions)
        self.observation_specs = networks.seen_specs(env_spec, self.distribution.num_parameters)
        networks.check_fits(config.network, self.observation_specs)
        torsos = networks.torsos_of(config.network, self.observation_specs)
        self.network = networks.ActorCriticNetwork(
            config=config.network,
            torsos=torsos,
            shared_torso=networks.shares_torso(config.network, torsos),
            num_parameters=self.distribution.num_parameters,
            num_shared_parameters=self.distribution.num_shared_parameters,
        )
        self.network_in_loop = self.network.clone(in_loop=True)
        self.optimizer = make_optimizer(config, learning_rate(config, self.gradient_steps_per_update))

    @property
    def gradient_steps_per_update(self) -> int:
        """How often one `update` steps the optimiser."""
        return 1

    def init(self, rng: jax.Array) -> ActorCriticState:
        # One compiled call: op by op the initialisers would compile one by one.
        return jax.jit(self._init)(rng)

    def _init(self, rng: jax.Array) -> ActorCriticState:
        observation = {n: jnp.zeros((1, *s.shape), s.dtype) for n, s in self.observation_specs.items()}
        network = self.network.init(rng, observation, jnp.zeros(1, bool), self.initial_state(1))
        statistics = {}
        if self.config.normalise_observations:
            vectors = {n: s for n, s in self.observation_specs.items() if len(s.shape) != 3}
            statistics = {n: normalisation.initial_statistics(s.shape) for n, s in vectors.items()}
        scale = normalisation.initial_reward_scale() if self.config.normalise_rewards else None
        return ActorCriticState(ActorParams(network, statistics), self.optimizer.init(network), scale)

    def actor_params(self, train_state: ActorCriticState) -> ActorParams:
        return train_state.params

    def to_fuse(self, train_state: ActorCriticState) -> Fused:
        params = train_state.params
        return Fused(params.network, (params.observation_statistics, train_state.reward_scale))

    def with_fused(self, train_state: ActorCriticState, fused: Fused) -> ActorCriticState:
        observation_statistics, reward_scale = fused.statistics
        return train_state._replace(params=ActorParams(fused.params, observation_statistics), reward_scale=reward_scale)

    def initial_state(self, batch_size: int) -> PyTree:
        return networks.initial_state(self.config.network, self.network.shared_torso, batch_size)

    def act(
        self, params: ActorParams, rng: jax.Array, observation: PyTree, is_first: jax.Array, state: PyTree
    ) -> tuple[jax.Array, dict[str, jax.Array], PyTree]:
        parameters, _, state = self.forward(params, observation, is_first, state)
        raw = self.distribution.sample(parameters, rng)
        extras = {"log_prob": self.distribution.log_prob(parameters, raw)}
        if self.keeps_raw_action:
            extras["raw_action"] = raw
        return self.distribution.to_action(raw), extras, state

    def act_greedy(
        self, params: ActorParams, observation: PyTree, is_first: jax.Array, state: PyTree
    ) -> tuple[jax.Array, PyTree]:
        """The policy's mode, for evaluation: action `[B, ...]` and the next recurrent state."""
        parameters, _, state = self.forward(params, observation, is_first, state)
        return self.distribution.to_action(self.distribution.mode(parameters)), state

    def forward(
        self, params: ActorParams, observation: PyTree, is_first: jax.Array, state: PyTree, in_loop: bool = False
    ) -> tuple[jax.Array, jax.Array, PyTree]:
        """Distribution parameters (masked), value and next recurrent state of one step or of an unroll.

        Args:
          params: of the network, and the observation statistics.
          observation: pytree of `[B, ...]` or `[T, B, ...]`, as the environment gives them.
          is_first: bool `[B]` or `[T, B]`.
          state: recurrent state before the first step, `[B, ...]`.
          in_loop: whether the caller is traced inside a loop.
        """
        seen = networks.seen(observation, self.observation_specs)
        for name, statistics in params.observation_statistics.items():
            seen[name] = normalisation.normalise(statistics, seen[name])
        network = self.network_in_loop if in_loop else self.network
        outputs: Any = network.apply(params.network, seen, is_first, state)
        parameters, value, state = outputs
        if self.env_spec.action_mask is not None:
            parameters = mask_logits(parameters, networks.named(observation)[self.env_spec.action_mask])
        return parameters, value, state

    def unroll(self, params: ActorParams, batch: Batch) -> Unroll:
        """Evaluate the current network on a batch, `[T + 1, b]` observations and `[T, b]` actions."""
        trajectory = batch.trajectory
        parameters, value, _ = self.forward(params, trajectory.observation, trajectory.is_first, trajectory.state)
        return Unroll(
            value,
            self.distribution.log_prob(parameters[:-1], self.raw_action(batch)),
            self.distribution.entropy(parameters[:-1]),
        )

    def raw_action(self, batch: Batch) -> jax.Array:
        """What the policy sampled, `[T, b, ...]`: continuous actions before they were clipped or squashed."""
        trajectory = batch.trajectory
        return trajectory.extras["raw_action"] if self.keeps_raw_action else trajectory.action

    def scaled_steps(
        self, scale: RewardScale | None, value: jax.Array, batch: Batch, axis_name: str
    ) -> tuple[Steps, RewardScale | None]:
        """Values, and rewards clipped and scaled as configured, for the returns; and the reward scale after this batch.

        Args:
          scale: before this batch, None when rewards are not normalised.
          value: float32 `[T + 1, b]`; carries no gradient.
          batch: this device's shard.
          axis_name: axis of the devices.
        """
        _, _, _, reward, terminated, truncated, valid, _, _ = batch.trajectory
        value = jax.lax.stop_gradient(value)
        if self.config.reward_clip is not None:
            reward = jnp.clip(reward, -self.config.reward_clip, self.config.reward_clip)
        steps = Steps(value, reward, terminated, truncated, valid)
        if scale is None:
            return steps, None
        unscaled = steps._replace(value=value * scale.scale)
        returns = gae(unscaled, self.config.discount, trace_lambda=1.0).target
        scale = normalisation.update_reward_scale(scale, returns, valid, axis_name)
        return steps._replace(reward=reward / scale.scale), scale

    def update_observation_statistics(
        self, params: ActorParams, batch: Batch, axis_name: str
    ) -> dict[str, RunningStatistics]:
        """The statistics after this batch: for the next version, since the importance weights need this one's."""
        observation, valid = networks.named(batch.trajectory.observation), batch.trajectory.valid
        return {
            name: normalisation.update_statistics(statistics, observation[name][:-1], valid, axis_name)
            for name, statistics in params.observation_statistics.items()
        }


def learning_rate(config: ActorCriticConfig, gradient_steps_per_update: int) -> optax.ScalarOrSchedule:
    """The configured learning rate by optimiser steps.

    Args:
      config: of the agent.
      gradient_steps_per_update: optimiser steps in one learner update; the schedule counts updates.
    """
    rate, steps = config.learning_rate, (config.schedule_learner_steps or 0) * gradient_steps_per_update
    schedules: dict[str, Callable[[], optax.ScalarOrSchedule]] = {
        "constant": lambda: rate,
        "linear": lambda: optax.linear_schedule(rate, 0.0, steps),
        "cosine": lambda: optax.cosine_decay_schedule(rate, steps),
    }
    return schedules[config.learning_rate_schedule]()
