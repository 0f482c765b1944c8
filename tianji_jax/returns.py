"""Returns and advantages of time-major trajectories: V-trace, GAE, n-step returns.

All of them agree on where a trajectory's episodes end: termination has no value beyond it, truncation bootstraps from
the value of the true last observation, and nothing flows through a step that only reset the environment. One backward
`lax.scan` each; none of their outputs carries a gradient.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Steps(NamedTuple):
    """What a return is made of.

    Attributes:
      value: float32 `[T + 1, B]`, `V(observation[t])`; the last one is the bootstrap value.
      reward: float32 `[T, B]`.
      terminated: bool `[T, B]`.
      truncated: bool `[T, B]`; `value[t + 1]` is then the value of the true last observation.
      valid: bool `[T, B]`; False where the step only reset the environment.
    """

    value: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    valid: jax.Array


class VTrace(NamedTuple):
    """What `vtrace` returns, each float32 `[T, B]`.

    Attributes:
      target: `vs`, the target of the value function; equals the value where the step is invalid.
      advantage: of the action taken, not multiplied by an importance weight; zero where the step is invalid.
      rho: importance weight clipped at `rho_bar`; zero where the step is invalid.
    """

    target: jax.Array
    advantage: jax.Array
    rho: jax.Array


class GAE(NamedTuple):
    """What `gae` returns, each float32 `[T, B]`.

    Attributes:
      target: advantage plus value; equals the value where the step is invalid.
      advantage: zero where the step is invalid.
    """

    target: jax.Array
    advantage: jax.Array


def vtrace(
    steps: Steps,
    log_weight: jax.Array,
    discount: float,
    trace_lambda: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> VTrace:
    """V-trace targets and advantages (Espeholt et al. 2018, IMPALA, equation 1; lambda as in remark 2).

    The advantage bootstraps from `lambda * vs[t + 1] + (1 - lambda) * V[t + 1]`, which for `lambda = 1` is the paper's
    `vs[t + 1]`. With all importance weights 1 it is GAE(lambda), and the target is GAE(lambda) plus the value.

    Args:
      steps: values `[T + 1, B]` and steps `[T, B]`.
      log_weight: float32 `[T, B]`, `log pi(a|x) - log mu(a|x)`: current over behaviour policy; ignored where invalid.
      discount: `gamma`; what is beyond a termination is discounted to nothing.
      trace_lambda: between 0 (one step) and 1.
      rho_bar: clips the weight of the temporal differences; it decides which policy's value the fixed point is.
      c_bar: clips the trace coefficients; it decides the speed and variance.
    """
    # Masked before the exponential: what a reset step holds must not become infinite.
    weight = jnp.exp(jnp.where(steps.valid, log_weight, 0.0))
    rho = jnp.where(steps.valid, jnp.minimum(rho_bar, weight), 0.0)
    c = jnp.where(steps.valid, trace_lambda * jnp.minimum(c_bar, weight), 0.0)
    delta, through = _temporal_difference(steps, discount)

    def backwards(excess: jax.Array, step: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        delta, through, rho, c = step
        advantage = delta + through * trace_lambda * excess
        excess = rho * delta + through * c * excess
        return excess, (excess, advantage)

    _, (excess, advantage) = jax.lax.scan(backwards, jnp.zeros_like(delta[0]), (delta, through, rho, c), reverse=True)
    return jax.lax.stop_gradient(VTrace(steps.value[:-1] + excess, advantage, rho))


def gae(steps: Steps, discount: float, trace_lambda: float) -> GAE:
    """Generalised advantage estimation (Schulman et al. 2016, equation 16).

    Args:
      steps: values `[T + 1, B]` and steps `[T, B]`.
      discount: `gamma`.
      trace_lambda: 0 is the one-step advantage, 1 the return to the end of episode or unroll minus the value.
    """
    delta, through = _temporal_difference(steps, discount)

    def backwards(advantage: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        delta, through = step
        advantage = delta + through * trace_lambda * advantage
        return advantage, advantage

    _, advantage = jax.lax.scan(backwards, jnp.zeros_like(delta[0]), (delta, through), reverse=True)
    return jax.lax.stop_gradient(GAE(steps.value[:-1] + advantage, advantage))


def n_step_returns(steps: Steps, discount: float, n: int) -> jax.Array:
    """Returns over `n` steps, then the value (Sutton & Barto 2018, equation 7.1): float32 `[T, B]`.

    Fewer steps where the episode or the unroll ends sooner: nothing beyond a termination, the value of the last
    observation at a truncation and at the end of the unroll. Equals the value where the step is invalid.

    Args:
      steps: values `[T + 1, B]` and steps `[T, B]`.
      discount: `gamma`.
      n: number of rewards summed, at least 1.

    Raises:
      ValueError: `n` is less than 1.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}")
    beyond = discount * jnp.where(steps.terminated, 0.0, 1.0)

    def backwards(returns: jax.Array, step: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        # returns[k] is the k-step return from the following observation, k = 0 .. n - 1.
        value, next_value, reward, beyond, truncated, valid = step
        longer = reward + beyond * jnp.where(truncated, next_value, returns)
        longer = jnp.where(valid, longer, value)
        return jnp.concatenate([value[None], longer[:-1]]), longer[-1]

    bootstrap = jnp.broadcast_to(steps.value[-1], (n, *steps.value.shape[1:]))
    inputs = (steps.value[:-1], steps.value[1:], steps.reward, beyond, steps.truncated, steps.valid)
    _, returns = jax.lax.scan(backwards, bootstrap, inputs, reverse=True)
    return jax.lax.stop_gradient(returns)


def _temporal_difference(steps: Steps, discount: float) -> tuple[jax.Array, jax.Array]:
    """One-step temporal differences and how much of the following step's estimate flows back, both `[T, B]`."""
    beyond = discount * jnp.where(steps.terminated, 0.0, 1.0)
    delta = steps.reward + beyond * steps.value[1:] - steps.value[:-1]
    delta = jnp.where(steps.valid, delta, 0.0)
    through = jnp.where(steps.valid & ~steps.truncated, beyond, 0.0)
    return delta, through
