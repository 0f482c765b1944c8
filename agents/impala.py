"""IMPALA: importance-weighted actor-learner architecture (Espeholt et al. 2018), one gradient step per batch."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from pydantic import Field, PositiveFloat

from tianji_jax import losses
from tianji_jax.agent import Metrics
from tianji_jax.normalisation import RewardScale
from tianji_jax.returns import vtrace
from tianji_jax.types import Batch, PyTree

from .actor_critic import ActorCritic, ActorCriticConfig, ActorCriticState, ActorParams
from .optimizers import descend


class IMPALAConfig(ActorCriticConfig):
    """Settings of IMPALA.

    Attributes:
      trace_lambda: 1 as in the paper.
      rho_bar: clips the importance weights of the temporal differences and of the policy gradient.
      c_bar: clips the trace coefficients.
    """

    trace_lambda: float = Field(1.0, ge=0, le=1)
    rho_bar: PositiveFloat = 1.0
    c_bar: PositiveFloat = 1.0


class IMPALA(ActorCritic):
    """Policy gradient with V-trace; trajectories that are not stale count as on-policy: their weights are 1."""

    Config: ClassVar[type[IMPALAConfig]] = IMPALAConfig
    config: IMPALAConfig

    def update(
        self, train_state: ActorCriticState, batch: Batch, rng: jax.Array, axis_name: str
    ) -> tuple[ActorCriticState, Metrics]:
        params, opt_state, scale = train_state
        gradient, (scale, metrics) = jax.grad(self._loss, has_aux=True)(params.network, params, scale, batch, axis_name)
        network, opt_state, norm = descend(self.optimizer, params.network, opt_state, gradient, axis_name)
        statistics = self.update_observation_statistics(params, batch, axis_name)
        params = ActorParams(network, statistics)
        return ActorCriticState(params, opt_state, scale), {**metrics, "gradient_norm": norm}

    def _loss(
        self, network: PyTree, params: ActorParams, scale: RewardScale | None, batch: Batch, axis_name: str
    ) -> tuple[jax.Array, tuple[RewardScale | None, Metrics]]:
        config, weight = self.config, batch.weight
        unroll = self.unroll(params._replace(network=network), batch)
        value = unroll.value[:-1]
        log_weight = losses.log_importance_weight(unroll.log_prob, batch.trajectory.extras["log_prob"], weight)
        steps, scale = self.scaled_steps(scale, unroll.value, batch, axis_name)
        log_correction = jnp.where(batch.stale, log_weight, 0.0)
        trace = vtrace(steps, log_correction, config.discount, config.trace_lambda, config.rho_bar, config.c_bar)

        policy_loss = losses.policy_gradient_loss(unroll.log_prob, trace.rho * trace.advantage, weight)
        value_loss = losses.value_loss(value, trace.target, weight)
        entropy_loss = losses.entropy_loss(unroll.entropy, weight)
        loss = policy_loss + config.value_coefficient * value_loss + config.entropy_coefficient * entropy_loss
        metrics = {
            "loss": loss,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": -entropy_loss,
            "ess": losses.effective_sample_size(log_weight, weight, axis_name),
            "importance_weight": losses.mean_importance_weight(log_weight, weight),
            "clip_fraction": losses.clip_fraction(log_weight, weight, config.rho_bar),
            "kl": losses.kl_divergence(log_weight, weight),
            "explained_variance": losses.explained_variance(value, trace.target, weight, axis_name),
            "value_mean": losses.weighted_mean(value, weight),
        }
        return loss, (scale, metrics)
