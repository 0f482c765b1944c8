"""Optimisers of optax by name, as the agents are configured with them, and a step of one."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from pydantic import Field, PositiveFloat

from tianji_jax.agent import AgentConfig
from tianji_jax.types import PyTree


class OptimizerConfig(AgentConfig):
    """Settings of all agents that descend a gradient.

    Attributes:
      learning_rate: of the optimiser.
      optimizer: any optimiser of optax by its name there, that needs only the gradient.
      optimizer_options: its further arguments, for example `{eps: 1.0e-5}`.
      max_gradient_norm: gradients are scaled down to this global norm; None for no limit.
    """

    learning_rate: PositiveFloat = 3e-4
    optimizer: str = "adam"
    optimizer_options: dict[str, Any] = Field(default_factory=dict)
    max_gradient_norm: PositiveFloat | None = 0.5


def make_optimizer(config: OptimizerConfig, learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """The configured optimiser with its gradient limit.

    Args:
      config: of the agent.
      learning_rate: a number, or a function of the optimiser's steps.

    Raises:
      ValueError: no optimiser of that name in optax, or it does not take these options.
    """
    known = _optimizers()
    if config.optimizer not in known:
        nearest = difflib.get_close_matches(config.optimizer.lower(), known, n=1, cutoff=0.0)
        raise ValueError(
            f"agent.optimizer {config.optimizer!r} is not an optimiser of optax; did you mean {nearest[0]!r}?"
        )
    try:
        optimizer = known[config.optimizer](learning_rate, **config.optimizer_options)
    except TypeError as error:
        allowed = [n for n in inspect.signature(known[config.optimizer]).parameters if n != "learning_rate"]
        raise ValueError(
            f"agent.optimizer_options {config.optimizer_options} do not fit {config.optimizer!r}, which takes"
            f" {', '.join(allowed)}"
        ) from error
    if config.max_gradient_norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(config.max_gradient_norm), optimizer)


def descend(
    optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree, gradient: PyTree, axis_name: str
) -> tuple[PyTree, PyTree, jax.Array]:
    """One step along one device's gradient, averaged over devices: parameters, optimiser state, gradient norm."""
    gradient = jax.lax.pmean(gradient, axis_name)
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, jnp.asarray(optax.tree.norm(gradient))


def _optimizers() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """All functions of optax that make an optimiser: those whose first argument is the learning rate.

    But for those that look along a line: their step needs the loss as a function, not only its gradient.
    """
    functions = {n: inspect.signature(f).parameters for n, f in inspect.getmembers(optax, inspect.isfunction)}
    return {
        n: getattr(optax, n)
        for n, parameters in functions.items()
        if next(iter(parameters), None) == "learning_rate" and "linesearch" not in parameters
    }
