"""What an agent must be, and the base most agents start from.

An agent is a bundle of pure functions over pytrees, so that any Flax module (Linen or NNX) fits, and anything else that
is a function of its parameters. An agent of your own lives in your own package and is named in the configuration as
`module:Class`.
"""

from abc import abstractmethod
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from pydantic import BaseModel, ConfigDict

from tianji_jax.types import Batch, EnvSpec, PyTree

Metrics: TypeAlias = dict[str, jax.Array]
"""Named float32 scalars of one update; averaged over devices before they are reported."""


class AgentConfig(BaseModel):
    """Base of an agent's settings: the keys under `agent:` in a configuration, besides `name`.

    Subclass it with annotated fields and defaults. Unknown keys and wrong types are refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Agent(Protocol):
    """The contract between an agent and the system.

    All methods are traced by JAX but for `__init__`: no side effects, no Python branches on array values. The class
    attribute `Config` is a pydantic model or dataclass with the agent's settings.
    """

    Config: type[Any]

    def __init__(self, config: Any, env_spec: EnvSpec) -> None:
        """Raise `ValueError`, saying what would fit, where settings and environment do not go together."""

    def init(self, rng: jax.Array) -> PyTree:
        """The whole training state: parameters, optimiser state, normalisers."""

    def actor_params(self, train_state: PyTree) -> PyTree:
        """The part of the training state that `act` needs; it is sent to the actors after each update."""

    def initial_state(self, batch_size: int) -> PyTree:
        """Recurrent state at the start of an episode, pytree of `[batch_size, ...]`; `()` when there is none."""

    def act(
        self, params: PyTree, rng: jax.Array, observation: PyTree, is_first: jax.Array, state: PyTree
    ) -> tuple[jax.Array, PyTree, PyTree]:
        """Choose actions for a batch of environments.

        Args:
          params: from `actor_params`.
          rng: a fresh key.
          observation: pytree of `[B, ...]`, dtypes as the environment gives them.
          is_first: bool `[B]`; where True the recurrent state is to be reset before use.
          state: recurrent state, pytree of `[B, ...]`.

        Returns:
          action `[B, ...]` as `env_spec.action` says, extras (a dict of `[B, ...]`; `log_prob` of the action under the
          distribution that sampled it, for agents that correct), and the next recurrent state.
        """

    def update(self, train_state: PyTree, batch: Batch, rng: jax.Array, axis_name: str) -> tuple[PyTree, Metrics]:
        """One learner step on one device's shard; the result must be the same on every device.

        Args:
          train_state: the same on every device.
          batch: this device's shard.
          rng: a key of this step, different on every device.
          axis_name: the axis to average over with `jax.lax.pmean`.

        Returns:
          The next training state and the metrics. If `ess` is among the metrics (the effective sample size of the
          importance weights as a fraction of the batch, 0 to 1) it can stop the reuse of a batch (`balance.min_ess`).
        """


@runtime_checkable
class CanBeGreedy(Protocol):
    """What an agent may have besides: a way to play without exploring, for `tianji eval` and `tianji export`."""

    def act_greedy(
        self, params: PyTree, observation: PyTree, is_first: jax.Array, state: PyTree
    ) -> tuple[jax.Array, PyTree]:
        """The actions to take when nothing is to be found out, such as the policy's mode.

        Args and shapes are those of `Agent.act`.

        Returns:
          action `[B, ...]` and the next recurrent state.
        """


class Fused(NamedTuple):
    """The part of a training state that groups which train together have in common.

    Attributes:
      params: pytree of float arrays; what is learned.
      statistics: pytree of arrays that are averaged whatever the outer optimiser, such as normalisers.
    """

    params: PyTree
    statistics: PyTree = ()


@runtime_checkable
class CanBeFused(Protocol):
    """What an agent may have besides: a way to train in groups (`tianji root`)."""

    def to_fuse(self, train_state: PyTree) -> Fused:
        """What this group has learned. What is not in it, such as an optimiser's state, each group keeps to itself."""

    def with_fused(self, train_state: PyTree, fused: Fused) -> PyTree:
        """The training state with what the groups have learned together, same shapes and dtypes, in its place."""


class ReplaySpec(NamedTuple):
    """What an agent wants drawn from replay.

    Attributes:
      n_step: rewards summed in a return, fewer where the episode or the unroll ends sooner.
      discount: of each further step.
      reward_clip: rewards are clipped to plus or minus this; None for no clipping.
      unrolls: whole unrolls are drawn, as `SampledUnrolls`, in place of transitions; nothing is summed or clipped.
    """

    n_step: int = 1
    discount: float = 0.99
    reward_clip: float | None = None
    unrolls: bool = False

    def steps_per_draw(self, unroll_length: int) -> int:
        """Environment steps in one thing drawn."""
        return unroll_length if self.unrolls else 1


@runtime_checkable
class ReplayAgent(Protocol):
    """An agent that learns from replay: as `Agent`, with these in place of `update`.

    What its `act` records in the extras is stored with each step, and so is a recurrent state at the start of each
    unroll: an agent that needs neither has none.
    """

    replay: ReplaySpec

    def learn(
        self, train_state: PyTree, sample: Any, rng: jax.Array, axis_name: str
    ) -> tuple[PyTree, Metrics, jax.Array]:
        """One gradient step on one device's part of a sample; the training state must be the same on every device.

        Args:
          train_state: the same on every device.
          sample: this device's, a `Sample`, or `SampledUnrolls` where `replay` asks for these.
          rng: a key of this step, different on every device.
          axis_name: the axis to average over with `jax.lax.pmean`.

        Returns:
          The next training state, metrics, and priorities float32 `[S]`, such as temporal differences: their absolute
          values decide how often these steps or unrolls are drawn, where `replay.prioritised` is set.
        """


class TrainState(NamedTuple):
    """Parameters and the state of their optimiser."""

    params: PyTree
    opt_state: PyTree


class GradientAgent:
    """Base of agents that descend a loss: write `init_params`, `act` and `loss`, and the rest is here.

    `self.optimizer` is any optax optimiser; set it in `__init__`.
    """

    optimizer: optax.GradientTransformation

    @abstractmethod
    def init_params(self, rng: jax.Array) -> PyTree:
        """Fresh parameters."""

    @abstractmethod
    def loss(self, params: PyTree, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Metrics]:
        """Scalar loss of one device's shard, and metrics.

        Average over steps with `mean(batch.weight * x)`: invalid steps then count for nothing and the average over
        devices is the average over all valid steps.
        """

    def init(self, rng: jax.Array) -> TrainState:
        params = self.init_params(rng)
        return TrainState(params, self.optimizer.init(params))

    def actor_params(self, train_state: TrainState) -> PyTree:
        return train_state.params

    def initial_state(self, batch_size: int) -> PyTree:
        return ()

    def to_fuse(self, train_state: TrainState) -> Fused:
        return Fused(train_state.params)

    def with_fused(self, train_state: TrainState, fused: Fused) -> TrainState:
        return train_state._replace(params=fused.params)

    def update(
        self, train_state: TrainState, batch: Batch, rng: jax.Array, axis_name: str
    ) -> tuple[TrainState, Metrics]:
        gradient, metrics = jax.grad(self.loss, has_aux=True)(train_state.params, batch, rng)
        gradient = jax.lax.pmean(gradient, axis_name)
        updates, opt_state = self.optimizer.update(gradient, train_state.opt_state, train_state.params)
        params = optax.apply_updates(train_state.params, updates)
        metrics = {**metrics, "gradient_norm": jnp.asarray(optax.tree.norm(gradient))}
        return TrainState(params, opt_state), metrics
