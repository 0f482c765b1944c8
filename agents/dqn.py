"""DQN (Mnih et al. 2015) with its parts as switches: double, dueling, n-step returns, quantiles (QR-DQN, Dabney et al.
2018), and exploration spread over the environments; with `replay.prioritised`, all of them but the quantiles are Ape-X
(Horgan et al. 2018) on one learner."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import optax
from pydantic import PositiveFloat, PositiveInt

from tianji_jax.agent import Metrics, ReplaySpec
from tianji_jax.types import EnvSpec, PyTree, Sample

from .q_learning import QLearning, QLearningConfig, QState, of_actions


class DQNConfig(QLearningConfig):
    """Settings of DQN.

    Attributes:
      huber_delta: errors beyond it count linearly.
      quantiles: 1 learns the mean of the return; more learn so many quantiles of it (QR-DQN).
    """

    huber_delta: PositiveFloat = 1.0
    quantiles: PositiveInt = 1


class DQN(QLearning):
    """Values of discrete actions, learned from transitions."""

    Config: ClassVar[type[DQNConfig]] = DQNConfig
    config: DQNConfig

    def __init__(self, config: DQNConfig, env_spec: EnvSpec) -> None:
        super().__init__(config, env_spec, config.quantiles)
        if config.network.recurrence != "none":
            raise ValueError(
                f"agent.network.recurrence is {config.network.recurrence!r}, but DQN learns from single transitions, "
                "which have no memory: set it to none, or take agent.name=r2d2"
            )
        self.replay = ReplaySpec(config.n_step, config.discount, config.reward_clip)

    def learn(
        self, train_state: QState, sample: Sample, rng: jax.Array, axis_name: str
    ) -> tuple[QState, Metrics, jax.Array]:
        train_state, metrics, (more, error) = self.improve(
            train_state, lambda network: self.loss(network, train_state.target, sample), axis_name
        )
        return train_state, {**metrics, **more}, error

    def loss(self, network: PyTree, target: PyTree, sample: Sample) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
        """Huber loss of one device's sample, or that of its quantiles; metrics, and priorities float32 `[S]`.

        Priorities are the temporal differences of the values.
        """
        first = jnp.zeros(sample.weight.shape, bool)  # matters to recurrent networks only

        def quantiles(variables: PyTree, observation: PyTree) -> jax.Array:
            return self.quantiles(self.network_in_loop, variables, observation, first, ())[0]

        def best(next_quantiles: jax.Array) -> jax.Array:
            values = self._mask(jnp.mean(next_quantiles, axis=-1), sample.next_observation)
            return jnp.argmax(values, axis=-1)

        taken = of_actions(quantiles(network, sample.observation), sample.action)
        following = quantiles(target, sample.next_observation)
        chooser = quantiles(network, sample.next_observation) if self.config.double else following
        following = of_actions(following, best(chooser))
        goal = jax.lax.stop_gradient(sample.reward[:, None] + sample.discount[:, None] * following)
        error = jnp.mean(taken, axis=-1) - jnp.mean(goal, axis=-1)
        delta = self.config.huber_delta
        if self.config.quantiles == 1:
            each = optax.huber_loss(error, delta=delta)
        else:
            each = quantile_huber_loss(taken, goal, delta)
        return jnp.mean(sample.weight * each), ({"value_mean": jnp.mean(taken)}, error)


def quantile_huber_loss(quantiles: jax.Array, goal: jax.Array, delta: float) -> jax.Array:
    """The loss of quantile regression, float32 `[S]` (Dabney et al. 2018a, QR-DQN, equation 10 and algorithm 1).

    Divided by `delta`, as in Dabney et al. 2018b, IQN, equation 3: small ones then have it approach the quantile loss.

    Args:
      quantiles: float32 `[S, Q]`; quantile `i` is that of `(i + 1/2) / Q`.
      goal: float32 `[S, R]`; samples of what they are the quantiles of.
      delta: errors beyond it count linearly.
    """
    count = quantiles.shape[-1]
    levels = ((jnp.arange(count) + 0.5) / count)[:, None]
    error = goal[:, None, :] - quantiles[:, :, None]
    asymmetric = jnp.abs(levels - (error < 0)) * optax.huber_loss(error, delta=delta) / delta
    return jnp.sum(jnp.mean(asymmetric, axis=-1), axis=-1)
