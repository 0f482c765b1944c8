"""What compiled programs move, against sizes known by hand and against XLA's own count."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from tianji_jax.hlo import padded_bytes, traffic

DEVICES = 4
SHARDED, REPLICATED = PartitionSpec("data"), PartitionSpec()


def compiled(function: Any, *arguments: Any, out: Any = REPLICATED) -> Any:
    """Of one device's view of arguments that are cut along their first axis."""
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("data",))
    program = jax.shard_map(function, mesh=mesh, in_specs=SHARDED, out_specs=out, check_vma=False)
    return jax.jit(program).lower(*arguments).compile()


@pytest.mark.parametrize(
    ("op", "function", "payload"),
    [
        ("all-reduce", lambda x: jax.lax.psum(x, "data"), 100 * 4),
        ("all-gather", lambda x: jax.lax.all_gather(x, "data"), DEVICES * 100 * 4),
        ("reduce-scatter", lambda x: jax.lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True), 100 * 4),
        ("all-to-all", lambda x: jax.lax.all_to_all(x, "data", 1, 1, tiled=True), 100 * 4),
        ("collective-permute", lambda x: jax.lax.ppermute(x, "data", [(0, 1), (1, 0), (2, 3), (3, 2)]), 100 * 4),
    ],
)
def test_collectives_carry_what_they_are_given_or_give(op: str, function: Any, payload: int) -> None:
    found = traffic(compiled(function, jnp.zeros((DEVICES, 100)), out=SHARDED).as_text())
    assert found.payload == {op: payload}
    assert found.collectives == 1


def test_collectives_in_a_loop_count_each_time() -> None:
    def update(x: jax.Array) -> jax.Array:
        def step(state: jax.Array, _: None) -> tuple[jax.Array, None]:
            return state - 0.1 * jax.lax.pmean(jnp.sin(state) * x[0], "data"), None

        return jax.lax.scan(step, jnp.ones(1000), None, length=13)[0]

    program = compiled(update, jnp.zeros((DEVICES, 1000)))
    found = traffic(program.as_text())
    assert found.payload == {"all-reduce": 13 * 1000 * 4}
    assert found.collectives == 13
    # Each step reads and writes some vectors of 4,000 bytes. XLA's own figure has one step only.
    assert 13 * 4 * 4000 < found.memory < 13 * 12 * 4000
    assert program.cost_analysis()["bytes accessed"] < found.memory / 5


def test_memory_of_a_program_without_loops_is_as_xla_counts_it() -> None:
    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    weights = [jnp.zeros((64, 256)), jnp.zeros((256, 256)), jnp.zeros((256, 8))]
    program = jax.jit(jax.grad(loss)).lower(weights, jnp.zeros((512, 64))).compile()
    assert traffic(program.as_text()).memory == pytest.approx(program.cost_analysis()["bytes accessed"], rel=0.1)


def test_a_loop_over_slices_reads_each_slice_once() -> None:
    """All of `xs` in each of 50 steps would be 50 times as much."""
    xs = jnp.zeros((50, 1000))

    def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.tanh(carry + x), carry * x

    program = jax.jit(lambda xs: jax.lax.scan(body, jnp.zeros(1000), xs)).lower(xs).compile()
    # Read x and the carry, write the carry and y, with some copies.
    assert 3 * xs.nbytes < traffic(program.as_text()).memory < 12 * xs.nbytes


FOR_A_TPU = """
%fused_slice (param_0.1: f32[16,8,256], param_1.1: s32[]) -> f32[8,256] {
  %param_0.1 = f32[16,8,256]{2,1,0:T(8,128)} parameter(0)
  %param_1.1 = s32[]{:T(128)S(6)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %slice.1 = f32[1,8,256]{2,1,0:T(8,128)} dynamic-slice(%param_0.1, %param_1.1, %zero, %zero)
  ROOT %out.1 = f32[8,256]{1,0:T(8,128)S(1)} bitcast(%slice.1)
}

%body (state: (s32[], f32[16,8,256])) -> (s32[], f32[16,8,256]) {
  %state = (s32[]{:T(128)}, f32[16,8,256]{2,1,0:T(8,128)}) parameter(0)
  %step = s32[]{:T(128)S(6)} get-tuple-element(%state), index=0
  %xs = f32[16,8,256]{2,1,0:T(8,128)} get-tuple-element(%state), index=1
  %x = f32[8,256]{1,0:T(8,128)S(1)} fusion(%xs, %step), kind=kLoop, calls=%fused_slice
  %sum = f32[8,256]{1,0:T(8,128)} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %next = (s32[]{:T(128)}, f32[16,8,256]{2,1,0:T(8,128)}) tuple(%step, %xs)
}

ENTRY %main (w: f32[3,5], xs0: f32[16,8,256]) -> f32[3,5] {
  %w = f32[3,5]{1,0:T(8,128)} parameter(0), metadata={op_name="w (the weights)"}
  %xs0 = f32[16,8,256]{2,1,0:T(8,128)} parameter(1)
  %i = s32[]{:T(128)S(6)} constant(0)
  %init = (s32[]{:T(128)}, f32[16,8,256]{2,1,0:T(8,128)}) tuple(%i, %xs0)
  %loop = (s32[]{:T(128)}, f32[16,8,256]{2,1,0:T(8,128)}) while(%init), LOOP
  %copy-start = (f32[3,5]{1,0:T(8,128)S(1)}, f32[3,5]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%w)
  %copy-done = f32[3,5]{1,0:T(8,128)S(1)} copy-done(%copy-start)
  ROOT %negative = f32[3,5]{1,0:T(8,128)} negate(%copy-done)
}

%test (state.1: (s32[], f32[16,8,256])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, f32[16,8,256]{2,1,0:T(8,128)}) parameter(0)
  ROOT %go = pred[]{:T(512)S(6)} constant(true)
}
"""


def test_the_form_that_programs_for_tpus_have() -> None:
    """Padding to tiles counts, memory on the chip does not, asynchronous copies count once."""
    loop = 'condition=%test, body=%body, backend_config={"known_trip_count":{"n":"16"}}'
    found = traffic(FOR_A_TPU.replace("LOOP", loop))
    slice_, weights = 8 * 256 * 4, 8 * 128 * 4
    # In each step a slice is read, and the sum written; then the weights are read, and written.
    assert found.memory == 16 * (slice_ + slice_) + weights + weights
    assert found.payload == {"all-reduce": 16 * slice_}
    assert found.collectives == 16


@pytest.mark.parametrize(
    ("dims", "order", "tile", "items"),
    [
        ((3, 5), (0, 1), (8, 128), 8 * 128),
        ((3, 5), (1, 0), (8, 128), 8 * 128),
        ((300, 5), (1, 0), (8, 128), 8 * 384),
        ((33, 128, 4, 84, 84), (0, 2, 3, 4, 1), (8, 128), 33 * 4 * 84 * 88 * 128),
        ((7,), (0,), (8, 128), 128),
        ((7, 3), (0, 1), (), 21),
    ],
)
def test_arrays_are_padded_to_tiles_in_the_order_of_their_layout(
    dims: tuple[int, ...], order: tuple[int, ...], tile: tuple[int, ...], items: int
) -> None:
    assert padded_bytes(dims, 2, order, tile) == 2 * items
