"""PPO: proximal policy optimisation with a clipped surrogate (Schulman et al. 2017).

It takes stale batches too: their advantages and value targets come from V-trace, and the surrogate's ratio is that to
the behaviour policy in any case.
"""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from pydantic import Field, PositiveFloat, PositiveInt

from tianji_jax import losses
from tianji_jax.agent import Metrics
from tianji_jax.returns import vtrace
from tianji_jax.types import Batch, PyTree

from .actor_critic import ActorCritic, ActorCriticConfig, ActorCriticState, ActorParams
from .optimizers import descend


class PPOConfig(ActorCriticConfig):
    """Settings of PPO.

    Attributes:
      clip_epsilon: how far the ratio of current to behaviour policy may move from 1 with profit.
      epochs: passes over each batch.
      minibatches: gradient steps per pass. Each device's shard is cut into so many: single steps for feed-forward
        networks, whole environments for recurrent ones.
      normalise_advantages: to mean 0 and standard deviation 1, per minibatch over all devices.
      value_clip: values may not profit from moving further than this from those before the update; None for no limit.
      rho_bar: as in V-trace, for stale trajectories.
      c_bar: as in V-trace, for stale trajectories.
    """

    clip_epsilon: float = Field(0.2, gt=0, lt=1)
    epochs: PositiveInt = 4
    minibatches: PositiveInt = 4
    normalise_advantages: bool = True
    value_clip: PositiveFloat | None = None
    rho_bar: PositiveFloat = 1.0
    c_bar: PositiveFloat = 1.0


class Samples(NamedTuple):
    """What the surrogate needs of `n` environments: `[T, n, ...]`, and `state` of `[n, ...]`.

    For feed-forward networks each step is an environment of its own: `[1, T * b, ...]`.
    """

    observation: PyTree
    is_first: jax.Array
    state: PyTree
    raw_action: jax.Array
    behaviour_log_prob: jax.Array
    advantage: jax.Array
    target: jax.Array
    old_value: jax.Array
    weight: jax.Array


class PPO(ActorCritic):
    """Clipped surrogate over epochs of shuffled minibatches."""

    Config: ClassVar[type[PPOConfig]] = PPOConfig
    config: PPOConfig

    @property
    def gradient_steps_per_update(self) -> int:
        return self.config.epochs * self.config.minibatches

    def update(
        self, train_state: ActorCriticState, batch: Batch, rng: jax.Array, axis_name: str
    ) -> tuple[ActorCriticState, Metrics]:
        params, opt_state, scale = train_state
        unroll = self.unroll(params, batch)
        log_weight = losses.log_importance_weight(unroll.log_prob, batch.trajectory.extras["log_prob"], batch.weight)
        steps, scale = self.scaled_steps(scale, unroll.value, batch, axis_name)
        trace = vtrace(
            steps,
            jnp.where(batch.stale, log_weight, 0.0),
            self.config.discount,
            self.config.trace_lambda,
            self.config.rho_bar,
            self.config.c_bar,
        )
        samples = self._samples(batch, trace.advantage, trace.target, unroll.value[:-1])
        indices = self._minibatch_indices(samples, rng)

        def step(carry: tuple[PyTree, PyTree], chosen: jax.Array) -> tuple[tuple[PyTree, PyTree], Metrics]:
            network, opt_state = carry
            minibatch = _take(samples, chosen)
            gradient, metrics = jax.grad(self._loss, has_aux=True)(network, params, minibatch, axis_name)
            network, opt_state, norm = descend(self.optimizer, network, opt_state, gradient, axis_name)
            return (network, opt_state), {**metrics, "gradient_norm": norm}

        (network, opt_state), metrics = jax.lax.scan(step, (params.network, opt_state), indices)
        value, weight = unroll.value[:-1], batch.weight
        metrics = {
            **jax.tree.map(jnp.mean, metrics),
            "ess": losses.effective_sample_size(log_weight, weight, axis_name),
            "importance_weight": losses.mean_importance_weight(log_weight, weight),
            "explained_variance": losses.explained_variance(value, trace.target, weight, axis_name),
            "value_mean": losses.weighted_mean(value, weight),
        }
        statistics = self.update_observation_statistics(params, batch, axis_name)
        return ActorCriticState(ActorParams(network, statistics), opt_state, scale), metrics

    def _loss(
        self, network: PyTree, params: ActorParams, samples: Samples, axis_name: str
    ) -> tuple[jax.Array, Metrics]:
        config, weight = self.config, samples.weight
        parameters, value, _ = self.forward(
            params._replace(network=network), samples.observation, samples.is_first, samples.state, in_loop=True
        )
        log_prob = self.distribution.log_prob(parameters, samples.raw_action)
        log_weight = losses.log_importance_weight(log_prob, samples.behaviour_log_prob, weight)
        advantage = samples.advantage
        if config.normalise_advantages:
            advantage = losses.normalise(advantage, weight, axis_name)

        policy_loss = losses.clipped_surrogate_loss(log_weight, advantage, config.clip_epsilon, weight)
        if config.value_clip is None:
            value_loss = losses.value_loss(value, samples.target, weight)
        else:
            value_loss = losses.clipped_value_loss(value, samples.old_value, samples.target, config.value_clip, weight)
        entropy_loss = losses.entropy_loss(self.distribution.entropy(parameters), weight)
        loss = policy_loss + config.value_coefficient * value_loss + config.entropy_coefficient * entropy_loss
        return loss, {
            "loss": loss,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": -entropy_loss,
            "clip_fraction": losses.clip_fraction(log_weight, weight, 1 + config.clip_epsilon, 1 - config.clip_epsilon),
            "kl": losses.kl_divergence(log_weight, weight),
        }

    def _samples(self, batch: Batch, advantage: jax.Array, target: jax.Array, old_value: jax.Array) -> Samples:
        trajectory = batch.trajectory
        samples = Samples(
            observation=jax.tree.map(lambda x: x[:-1], trajectory.observation),
            is_first=trajectory.is_first[:-1],
            state=trajectory.state,
            raw_action=self.raw_action(batch),
            behaviour_log_prob=trajectory.extras["log_prob"],
            advantage=advantage,
            target=target,
            old_value=old_value,
            weight=batch.weight,
        )
        if self.config.network.recurrence != "none":
            return samples
        return jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), samples)

    def _minibatch_indices(self, samples: Samples, rng: jax.Array) -> jax.Array:
        """Environments of each minibatch, int32 `[epochs * minibatches, n / minibatches]`; each once per epoch."""
        n, minibatches = samples.weight.shape[1], self.config.minibatches
        if n % minibatches:
            unit = "steps" if self.config.network.recurrence == "none" else "environments"
            raise ValueError(
                f"agent.minibatches {minibatches} does not divide the {n} {unit} of one device's shard of a batch"
            )
        order = jax.vmap(lambda rng: jax.random.permutation(rng, n))(jax.random.split(rng, self.config.epochs))
        return order.reshape(-1, n // minibatches)


def _take(samples: Samples, chosen: jax.Array) -> Samples:
    taken = jax.tree.map(lambda x: jnp.take(x, chosen, axis=1), samples._replace(state=()))
    return taken._replace(state=jax.tree.map(lambda x: jnp.take(x, chosen, axis=0), samples.state))
