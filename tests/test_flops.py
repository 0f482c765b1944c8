"""Operations of traced programs, against numbers known by hand and against XLA's own count."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec

from tianji_jax.flops import count_flops

A, B = jnp.zeros((8, 16)), jnp.zeros((16, 32))
MATMUL = 2 * 8 * 16 * 32


def flops(function: Any, *arguments: Any) -> float:
    return count_flops(jax.make_jaxpr(function)(*arguments))


def test_a_product_of_matrices_is_two_operations_for_each_term() -> None:
    assert flops(jnp.matmul, A, B) == MATMUL
    batched = jnp.einsum("bij,bjk->bik", jnp.zeros((5, 8, 16)), jnp.zeros((5, 16, 32)))
    assert batched.shape == (5, 8, 32)
    assert flops(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), jnp.zeros((5, 8, 16)), jnp.zeros((5, 16, 32))) == (
        5 * MATMUL
    )


def test_loops_count_as_often_as_they_run_branches_as_the_dearest() -> None:
    def loop(a: jax.Array, b: jax.Array) -> jax.Array:
        def step(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return carry + jnp.tanh(a @ b), None

        return jax.lax.scan(step, jnp.zeros((8, 32)), None, length=7)[0]

    assert flops(loop, A, B) == 7 * MATMUL
    assert flops(jax.jit(jax.checkpoint(loop)), A, B) == 7 * MATMUL
    choice = lambda a, b: jax.lax.cond(a[0, 0] > 0, lambda: a @ b @ b.T @ b, lambda: a @ b)  # noqa: E731
    assert flops(choice, A, B) == 3 * MATMUL


def test_a_shard_map_counts_for_one_device() -> None:
    mesh = Mesh(jax.devices()[:4], ("data",))
    spec = PartitionSpec("data")
    program = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)
    assert flops(program, A, B) == MATMUL / 4


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_convolutions_and_their_gradients_are_those_of_xla(stride: int, padding: str) -> None:
    """The gradient with respect to the input is a convolution with holes in it, which are not multiplied."""
    images, kernel = jnp.zeros((4, 21, 21, 8)), jnp.zeros((5, 5, 8, 16))

    def loss(images: jax.Array, kernel: jax.Array) -> jax.Array:
        layout = ("NHWC", "HWIO", "NHWC")
        out = jax.lax.conv_general_dilated(images, kernel, (stride, stride), padding, dimension_numbers=layout)
        return jnp.sum(out * out)

    gradient = jax.grad(loss, argnums=(0, 1))
    xla = jax.jit(gradient).lower(images, kernel).cost_analysis()["flops"]
    # XLA counts the few additions and products of the rest as well.
    assert flops(gradient, images, kernel) == pytest.approx(xla, rel=0.03)
    assert flops(gradient, images, kernel) <= xla
