"""Losses and diagnostics of actor-critic learning: pure functions of `[T, b]` arrays.

`weight` is `Batch.weight`: zero at invalid steps. Every loss is `mean(weight * x)` over one device's shard; its `pmean`
over the devices is the mean over all valid steps. Functions that take `axis_name` are not linear in the steps and
average over the devices themselves; without one they look at their own arrays only.
"""

import jax
import jax.numpy as jnp

# Beyond it a log importance weight says no more than "very different", and its exponential's square leaves float32.
_MAX_LOG_WEIGHT = 20.0


def weighted_mean(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`mean(weight * x)`, whatever `x` holds where the weight is zero; float32 scalar."""
    return jnp.mean(weight * jnp.where(weight > 0, x, 0.0))


def log_importance_weight(log_prob: jax.Array, behaviour_log_prob: jax.Array, weight: jax.Array) -> jax.Array:
    """`log pi(a|x) - log mu(a|x)`, `[T, b]`: safe to exponentiate, zero at invalid steps.

    Masked before any exponential (the gradient of an infinity times zero is not a number), and limited to plus or minus
    20, beyond which it carries no gradient.

    Args:
      log_prob: of the action taken under the current policy.
      behaviour_log_prob: of the same action under the policy that took it.
      weight: of the steps.
    """
    difference = jnp.where(weight > 0, log_prob - behaviour_log_prob, 0.0)
    return jnp.clip(difference, -_MAX_LOG_WEIGHT, _MAX_LOG_WEIGHT)


def policy_gradient_loss(log_prob: jax.Array, advantage: jax.Array, weight: jax.Array) -> jax.Array:
    """`-mean(log pi(a|x) * advantage)` (Espeholt et al. 2018, section 4.2, with `rho` times the advantage there)."""
    return -weighted_mean(log_prob * jax.lax.stop_gradient(advantage), weight)


def clipped_surrogate_loss(
    log_weight: jax.Array, advantage: jax.Array, clip_epsilon: float, weight: jax.Array
) -> jax.Array:
    """PPO's clipped surrogate (Schulman et al. 2017, equation 7), negated.

    Args:
      log_weight: from `log_importance_weight`; the ratio is that of the current to the behaviour policy.
      advantage: of the actions taken; carries no gradient.
      clip_epsilon: the ratio has no incentive to leave `1 - clip_epsilon .. 1 + clip_epsilon`.
      weight: of the steps.
    """
    advantage = jax.lax.stop_gradient(advantage)
    ratio = jnp.exp(log_weight)
    clipped = jnp.clip(ratio, 1.0 - clip_epsilon, 1.0 + clip_epsilon)
    return -weighted_mean(jnp.minimum(ratio * advantage, clipped * advantage), weight)


def value_loss(value: jax.Array, target: jax.Array, weight: jax.Array) -> jax.Array:
    """Half the mean squared error of the value; the target carries no gradient."""
    return 0.5 * weighted_mean((value - jax.lax.stop_gradient(target)) ** 2, weight)


def clipped_value_loss(
    value: jax.Array, old_value: jax.Array, target: jax.Array, clip: float, weight: jax.Array
) -> jax.Array:
    """Half the larger of the squared errors of the value and of the value kept within `clip` of the old one.

    As in OpenAI Baselines' PPO2; there is no paper's equation for it (Engstrom et al. 2020 discuss it, section 3).
    """
    old_value, target = jax.lax.stop_gradient((old_value, target))
    clipped = old_value + jnp.clip(value - old_value, -clip, clip)
    return 0.5 * weighted_mean(jnp.maximum((value - target) ** 2, (clipped - target) ** 2), weight)


def entropy_loss(entropy: jax.Array, weight: jax.Array) -> jax.Array:
    """Minus the mean entropy, in nats."""
    return -weighted_mean(entropy, weight)


def mean_importance_weight(log_weight: jax.Array, weight: jax.Array) -> jax.Array:
    """Mean of `pi / mu`; about 1 as long as the weights can be trusted."""
    return weighted_mean(jnp.exp(log_weight), weight)


def clip_fraction(log_weight: jax.Array, weight: jax.Array, upper: float, lower: float = 0.0) -> jax.Array:
    """Share of steps whose importance weight is outside `lower .. upper`, by more than rounding (1e-3)."""
    importance = jnp.exp(log_weight)
    outside = (importance > upper + 1e-3) | (importance < lower - 1e-3)
    return weighted_mean(outside.astype(jnp.float32), weight)


def kl_divergence(log_weight: jax.Array, weight: jax.Array) -> jax.Array:
    """Mean of `w - 1 - log w`, an estimate of KL(behaviour || current) that is never negative.

    The estimator "k3" of Schulman, "Approximating KL divergence" (2020): unbiased, and of less variance than `-log w`.
    """
    return weighted_mean(jnp.expm1(log_weight) - log_weight, weight)


def effective_sample_size(log_weight: jax.Array, weight: jax.Array, axis_name: str | None = None) -> jax.Array:
    """Kong's effective sample size `(sum w)^2 / (n sum w^2)` over the valid steps of all devices, between 0 and 1."""
    importance = jnp.exp(log_weight)
    moments = jnp.stack([weight, weight * importance, weight * importance**2])
    total, first, second = _mean_over_devices(jnp.mean(moments, axis=(1, 2)), axis_name)
    return first**2 / jnp.maximum(total * second, jnp.finfo(jnp.float32).tiny)


def explained_variance(
    value: jax.Array, target: jax.Array, weight: jax.Array, axis_name: str | None = None
) -> jax.Array:
    """`1 - Var(target - value) / Var(target)` over the valid steps of all devices; 0 where the target does not vary."""
    _, error_variance = weighted_moments(target - value, weight, axis_name)
    _, target_variance = weighted_moments(target, weight, axis_name)
    varies = target_variance > 0
    return jnp.where(varies, 1.0 - error_variance / jnp.where(varies, target_variance, 1.0), 0.0)


def normalise(x: jax.Array, weight: jax.Array, axis_name: str | None = None) -> jax.Array:
    """`x` with mean 0 and standard deviation 1 over the valid steps of all devices; zero at invalid steps."""
    mean, variance = weighted_moments(x, weight, axis_name)
    return jnp.where(weight > 0, (x - mean) * jax.lax.rsqrt(variance + 1e-10), 0.0)


def weighted_moments(x: jax.Array, weight: jax.Array, axis_name: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Mean and variance over the valid steps of all devices, float32 scalars.

    Right for a part of a batch too, whose weights do not average to one.
    """
    total = jnp.maximum(_mean_over_devices(jnp.mean(weight), axis_name), jnp.finfo(jnp.float32).tiny)
    mean = _mean_over_devices(weighted_mean(x, weight), axis_name) / total
    variance = _mean_over_devices(weighted_mean((x - mean) ** 2, weight), axis_name) / total
    return mean, variance


def _mean_over_devices(x: jax.Array, axis_name: str | None) -> jax.Array:
    return x if axis_name is None else jax.lax.pmean(x, axis_name)
