"""Convolutions on this machine: XLA's own against patches times matrix, alone and inside a loop.

    python scripts/bench_convolution.py

Prints microseconds per sample of a gradient step, median of several, and their ratio from the same run.
"""

import os
import statistics
import time
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from tianji_jax.agents.networks import NatureCNN, SmallCNN
from tianji_jax.types import PyTree

SAMPLES, STEPS, REPEATS = 256, 4, 5


def main() -> None:
    table = Table(title=f"microseconds per sample, {jax.default_backend()}, load {os.getloadavg()[0]:.1f}")
    for column in ("network", "where", "XLA's own", "patches", "ratio"):
        table.add_column(column)
    for name, network, pixels in (("small_cnn", SmallCNN, 42), ("nature_cnn", NatureCNN, 84)):
        images = jax.random.uniform(jax.random.key(0), (STEPS, SAMPLES, pixels, pixels, 4))
        for where, run in (("one step", one_step), ("in a loop", in_a_loop)):
            native, patches = (seconds(network(jnp.float32, in_loop), images, run) for in_loop in (False, True))
            table.add_row(name, where, f"{1e6 * native:.0f}", f"{1e6 * patches:.0f}", f"{native / patches:.1f}")
    Console().print(table)


def one_step(gradient: Callable, params: PyTree, images: jax.Array) -> PyTree:
    """A gradient step on all images at once."""
    return gradient(params, images.reshape(-1, *images.shape[2:]))


def in_a_loop(gradient: Callable, params: PyTree, images: jax.Array) -> PyTree:
    """A gradient step for each minibatch."""

    def step(params: PyTree, images: jax.Array) -> tuple[PyTree, None]:
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradient(params, images)), None

    return jax.lax.scan(step, params, images)[0]


def seconds(network: nn.Module, images: jax.Array, run: Callable) -> float:
    """Median time per sample."""
    params = network.init(jax.random.key(1), images[0, :1])
    gradient = jax.grad(lambda params, x: jnp.mean(network.apply(params, x) ** 2))
    compiled = jax.jit(lambda params, x: run(gradient, params, x)).lower(params, images).compile()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(compiled(params, images))
        times.append(time.perf_counter() - began)
    return statistics.median(times) / (SAMPLES * STEPS)


if __name__ == "__main__":
    main()
