"""Stacked frames in replay, each held once: consecutive observations share all of theirs but the newest."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tianji_jax.config import ConfigError
from tianji_jax.types import ArraySpec, PyTree


class Frames(NamedTuple):
    """What is held of unrolls of stacks; `n` is the number of frames in a stack.

    Attributes:
      frame: `[..., n + T, c, H, W]`; those of the first stack, then the newest of each.
      follows: bool `[..., T + 1]`; the stack is the one before it with the newest frame appended and the oldest gone.
        Where it is not, it holds its newest frame only, `n` times: an episode has begun.
    """

    frame: jax.Array
    follows: jax.Array


class FrameStacks:
    """Takes stacks apart and puts them together again; other observations pass through."""

    def __init__(self, frames: int | None, observation: PyTree) -> None:
        """
        Args:
          frames: in a stack, `n`; None holds everything as it comes.
          observation: `ArraySpec` leaves with any leading dimensions; images are `[..., n * c, H, W]`, oldest first.

        Raises:
          ConfigError: there is no image whose channels could be so many frames.
        """
        self.frames = frames
        specs = jax.tree.leaves(observation)
        # Of one environment at one time: the two leading dimensions are those of the unroll.
        self._stacked = [frames is not None and _is_stack(spec.shape[2:], frames) for spec in specs]
        if frames is not None and not any(self._stacked):
            shapes = ", ".join(str(ArraySpec(spec.shape[2:], spec.dtype)) for spec in specs)
            raise ConfigError(
                f"replay.frame_stack is {frames}, but no observation is an image of so many frames (channels, height, "
                f"width): there is {shapes}; leave it out"
            )

    def take_apart(self, observation: PyTree) -> tuple[PyTree, PyTree]:
        """What to hold of unrolls `[b, 1, T + 1, ...]`, and how many stacks will not come back as they are.

        That is an int32 scalar, or `()` where there are no stacks.
        """
        if self.frames is None:
            return observation, ()
        leaves, treedef = jax.tree.flatten(observation)
        held, torn = [], jnp.zeros((), jnp.int32)
        for x, stacked in zip(leaves, self._stacked, strict=True):
            if not stacked:
                held.append(x)
                continue
            stack = x.reshape(*x.shape[:3], self.frames, -1, *x.shape[4:])
            follows = _same(stack[:, :, 1:, :-1], stack[:, :, :-1, 1:])
            padded = _same(stack[:, :, 1:, :-1], stack[:, :, 1:, -1:])
            torn += jnp.sum(~(follows | padded), dtype=jnp.int32)
            follows = jnp.concatenate([jnp.ones_like(follows[:, :, :1]), follows], axis=2)
            held.append(Frames(jnp.concatenate([stack[:, :, 0], stack[:, :, 1:, -1]], axis=2), follows))
        return jax.tree.unflatten(treedef, held), torn

    def at(self, held: PyTree, row: jax.Array, slot: jax.Array, step: jax.Array) -> PyTree:
        """Observations `[*step.shape, ...]`.

        Args:
          held: leaves `[rows, slots, ...]`, as `take_apart` leaves them.
          row: int32, broadcasts with `step`, as does `slot`.
          slot: int32.
          step: int32, of the unroll.
        """

        def one(x: jax.Array | Frames) -> jax.Array:
            if not isinstance(x, Frames):
                return x[row, slot, step]
            assert self.frames is not None
            begun = jnp.where(x.follows[row, slot], 0, jnp.arange(x.follows.shape[-1]))
            begun = jnp.max(jnp.where(jnp.arange(begun.shape[-1]) <= step[..., None], begun, 0), axis=-1)
            # Frame `t + n - 1` is the newest of step `t`: none before the one an episode began with.
            oldest = jnp.where(begun > 0, begun + self.frames - 1, 0)
            frame = jnp.maximum(step[..., None] + jnp.arange(self.frames), oldest[..., None])
            stack = x.frame[row[..., None], slot[..., None], frame]
            return stack.reshape(*step.shape, -1, *stack.shape[-2:])

        return jax.tree.map(one, held, is_leaf=lambda x: isinstance(x, Frames))

    def check(self, torn: float) -> None:
        """
        Raises:
          ConfigError: stacks were torn, so that what is drawn is not what was seen.
        """
        if torn:
            raise ConfigError(
                f"replay.frame_stack is {self.frames}, but {torn:.0f} observations were neither the one before them "
                "shifted by a frame nor one frame repeated: leave it out for this environment"
            )


def _is_stack(shape: tuple[int, ...], frames: int) -> bool:
    return len(shape) == 3 and shape[0] % frames == 0


def _same(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether all that follows the three leading dimensions is equal, bool."""
    return jnp.all(a == b, axis=tuple(range(3, a.ndim)))
