"""R2D2 (Kapturowski et al. 2019): Q-learning with memory, from whole unrolls in replay.

An unroll begins with the recurrent state its actor had. That state is older than the network, so that the first
`burn_in` steps only bring it up to date. Where an episode begins among them it is known to be zero: from there on steps
count. Unlike in the paper unrolls do not overlap, and gradients flow through the burn-in; the network does not see the
last action and reward.
"""

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from tianji_jax.agent import Metrics, ReplaySpec
from tianji_jax.returns import Steps, n_step_returns
from tianji_jax.types import EnvSpec, PyTree, SampledUnrolls

from . import networks
from .q_learning import QLearning, QLearningConfig, QState, of_actions


class R2D2NetworkConfig(networks.NetworkConfig):
    """A network that remembers unless told otherwise."""

    recurrence: Literal["none", "lstm", "gru"] = "lstm"


class R2D2Config(QLearningConfig):
    """Settings of R2D2.

    Attributes:
      burn_in: first steps of an unroll that are not learned from.
      rescale: eps of the function that values are squashed by, `rescale_value`; None for none.
      max_priority_share: an unroll's priority is so much of its largest error, and the rest of the mean.
    """

    n_step: int = Field(5, ge=1)
    dueling: bool = True
    burn_in: NonNegativeInt = 0
    rescale: NonNegativeFloat | None = 1e-3
    max_priority_share: float = Field(0.9, ge=0, le=1)
    max_gradient_norm: PositiveFloat | None = 40.0
    network: R2D2NetworkConfig = R2D2NetworkConfig()


class R2D2(QLearning):
    """Values of discrete actions and what has been seen, learned from unrolls."""

    Config: ClassVar[type[R2D2Config]] = R2D2Config
    config: R2D2Config

    def __init__(self, config: R2D2Config, env_spec: EnvSpec) -> None:
        super().__init__(config, env_spec)
        if config.network.recurrence == "none":
            raise ValueError(
                "agent.network.recurrence is none, but R2D2 is for networks with memory: set it to lstm or gru, or "
                "take agent.name=dqn"
            )
        self.replay = ReplaySpec(unrolls=True)

    def learn(
        self, train_state: QState, sample: SampledUnrolls, rng: jax.Array, axis_name: str
    ) -> tuple[QState, Metrics, jax.Array]:
        length = sample.trajectory.reward.shape[0]
        if self.config.burn_in >= length:
            raise ValueError(
                f"agent.burn_in is {self.config.burn_in}, which leaves nothing of an unroll to learn from: make it "
                f"less than actors.unroll_length={length}"
            )
        train_state, metrics, (more, priority) = self.improve(
            train_state, lambda network: self.loss(network, train_state.target, sample, axis_name), axis_name
        )
        return train_state, {**metrics, **more}, priority

    def loss(
        self, network: PyTree, target: PyTree, sample: SampledUnrolls, axis_name: str
    ) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
        """Half the squared error over all steps that count; metrics, and priorities float32 `[S]`."""
        trajectory, config = sample.trajectory, self.config

        def values(variables: PyTree) -> jax.Array:
            observation, is_first, state = trajectory.observation, trajectory.is_first, trajectory.state
            return self.values(self.network_in_loop, variables, observation, is_first, state)[0]

        now, later = values(network), values(target)
        best = jnp.argmax(now if config.double else later, axis=-1)
        goal = jax.lax.stop_gradient(self._goal(of_actions(later, best), trajectory))
        taken = of_actions(now[:-1], trajectory.action)
        counts = self.counts(trajectory)
        error = jnp.where(counts, taken - goal, 0.0)
        # Of all devices, so that their mean gradient is that of the mean over all steps.
        total = jnp.maximum(jax.lax.pmean(jnp.sum(counts, dtype=jnp.float32), axis_name), 1.0)
        loss = 0.5 * jnp.sum(sample.weight * error**2) / total
        size, steps = jnp.abs(error), jnp.maximum(jnp.sum(counts, axis=0), 1)
        share = config.max_priority_share
        priority = share * jnp.max(size, axis=0) + (1.0 - share) * jnp.sum(size, axis=0) / steps
        return loss, ({"value_mean": jnp.sum(jnp.where(counts, taken, 0.0)) / total}, priority)

    def counts(self, trajectory: Any) -> jax.Array:
        """The steps that are learned from, bool `[T, S]`: valid, and after the burn-in or in an episode begun in it."""
        begun = jnp.cumsum(trajectory.is_first[:-1], axis=0) > 0
        burned_in = jnp.arange(len(begun))[:, None] >= self.config.burn_in
        return trajectory.valid & (begun | burned_in)

    def _goal(self, value: jax.Array, trajectory: Any) -> jax.Array:
        """`n`-step targets `[T, S]` of rescaled values `[T + 1, S]` (Kapturowski et al. 2019, section 2.3)."""
        config = self.config
        if config.rescale is not None:
            value = unscale_value(value, config.rescale)
        reward = trajectory.reward
        if config.reward_clip is not None:
            reward = jnp.clip(reward, -config.reward_clip, config.reward_clip)
        steps = Steps(value, reward, trajectory.terminated, trajectory.truncated, trajectory.valid)
        goal = n_step_returns(steps, config.discount, config.n_step)
        return goal if config.rescale is None else rescale_value(goal, config.rescale)


def rescale_value(x: jax.Array, eps: float) -> jax.Array:
    """`h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x` (Pohlen et al. 2018, section 3.2), elementwise."""
    return jnp.sign(x) * (jnp.sqrt(jnp.abs(x) + 1.0) - 1.0) + eps * x


def unscale_value(x: jax.Array, eps: float) -> jax.Array:
    """The inverse of `rescale_value` (Pohlen et al. 2018, proposition A.2), elementwise.

    With `s` the root of `|h^-1(x)| + 1`, `eps s^2 + s = |x| + 1 + eps`; solved so that small `eps` lose no digits.
    """
    size = jnp.abs(x) + 1.0 + eps
    root = 2.0 * size / (1.0 + jnp.sqrt(1.0 + 4.0 * eps * size))
    return jnp.sign(x) * (root**2 - 1.0)
