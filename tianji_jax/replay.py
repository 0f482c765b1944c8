"""Replay on the learner's devices: each holds what came of its own shard, and draws its part of every sample from that.

The unit is the unroll: what one environment did in one trajectory, `T` steps and the observation after them. A batch's
environments come from other actors each time, so that unrolls which lie side by side have nothing to do with each
other; nothing here looks beyond one. So no transition reaches over the write head, a gap, or from one actor to
another, and `T + 1` observations are stored for `T` steps. Agents draw transitions, or whole unrolls.

Unrolls lie in a trajectory buffer of flashbax whose time axis has one unroll per entry. What is drawn from it is
decided here: flashbax draws reset steps too, and its sum tree adds differences to float32 sums, which drift (after 5
million priorities around 1 had been set, and then small ones, its total was negative). Here sums are taken anew from
what they are sums of: one for each unroll, and those over unrolls in each draw.
"""

import math
from typing import Any, NamedTuple

import flashbax
import jax
import jax.numpy as jnp
import numpy as np
import psutil

from tianji_jax.agent import ReplaySpec
from tianji_jax.config import ConfigError
from tianji_jax.device_queue import Shard
from tianji_jax.replay_config import ReplayConfig
from tianji_jax.replay_frames import FrameStacks
from tianji_jax.types import DATA_AXIS, ArraySpec, PyTree, Sample, SampledUnrolls, Trajectory

SMALLEST_PRIORITY = 1e-6
"""Added to every priority, so that each step can be drawn again (Schaul et al. 2016, section 3.3)."""


class ReplayState(NamedTuple):
    """What one device holds: `C` unrolls in each of `b` rows.

    Attributes:
      buffer: of flashbax; its experience is a `Shard` with leaves `[b, C, ...]`, steps after these.
      entries: int32 `[b, C]`; what can be drawn of each unroll: its valid steps, or 1 where unrolls are drawn and it
        has any; 0 where there is no unroll yet.
      mass: float32 `[b, C, E]`; what each entry is drawn in proportion to, 0 where invalid; `E` is `T`, or 1 where
        unrolls are drawn; `()` if not prioritised.
      unroll_mass: float32 `[b, C]`; its sum over each unroll; `()` if not prioritised.
      largest_mass: float32 scalar; the largest so far on any device, which new entries get; `()` if not prioritised.
      torn: int32 scalar; stacks of frames that are not held as they came (`FrameStacks`); `()` where none are.
    """

    buffer: Any
    entries: jax.Array
    mass: PyTree
    unroll_mass: PyTree
    largest_mass: PyTree
    torn: PyTree


class Place(NamedTuple):
    """Where sampled entries lie, int32 `[S]` each: `[row, slot, entry]`; and the mass they were drawn with, `[S]`."""

    row: jax.Array
    slot: jax.Array
    entry: jax.Array
    mass: jax.Array


class Replay:
    """Pure functions of a `ReplayState`, one device's view, to be traced under `DATA_AXIS`."""

    def __init__(self, config: ReplayConfig, spec: ReplaySpec, shard: Shard, devices: int) -> None:
        """
        Args:
          config: of the replay.
          spec: what the agent wants drawn.
          shard: spec of what is inserted on one device, `ArraySpec` leaves.
          devices: `D`.

        Raises:
          ConfigError: the sample cannot be divided among the devices, an unroll is shorter than `n` steps, or
            observations are no stacks of frames.
        """
        self.unroll_length, self.rows = shard.trajectory.reward.shape
        if config.batch_size % devices:
            raise ConfigError(
                f"replay.batch_size: {config.batch_size} samples cannot be divided among {devices} devices; make it a "
                f"multiple of {devices}"
            )
        if not spec.unrolls and spec.n_step > self.unroll_length:
            raise ConfigError(
                f"returns over {spec.n_step} steps do not fit into actors.unroll_length={self.unroll_length}: make "
                "that longer or agent.n_step smaller"
            )
        self.config, self.spec, self.devices = config, spec, devices
        self.steps_per_insert = devices * self.rows * self.unroll_length
        self.slots = config.capacity // self.steps_per_insert
        self.capacity = self.slots * self.steps_per_insert
        self.batch_size = config.batch_size // devices
        self.stacks = FrameStacks(config.frame_stack, shard.trajectory.observation)
        self.samples_per_update = config.samples_per_update(spec.steps_per_draw(self.unroll_length))
        self._buffer = flashbax.make_trajectory_buffer(
            add_batch_size=self.rows,
            sample_batch_size=1,
            sample_sequence_length=1,
            period=1,
            min_length_time_axis=1,
            max_length_time_axis=self.slots,
        )
        self._unroll = jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct(spec.shape[2:], spec.dtype),
            jax.eval_shape(lambda shard: self._held(shard)[0], _structs(shard)),
        )
        self.state_spec: ReplayState = jax.tree.map(lambda x: ArraySpec(x.shape, x.dtype), jax.eval_shape(self.init))

    @property
    def nbytes(self) -> int:
        """What it takes of each device's memory."""
        return sum(spec.nbytes for spec in jax.tree.leaves(self.state_spec))

    def check_memory(self, device: jax.Device) -> None:
        """
        Raises:
          ConfigError: it does not fit into the memory that is free on the devices; the message says what does.
        """
        sharing = self.devices if device.platform == "cpu" else 1
        free = _free_memory(device) // sharing
        if self.nbytes > free:
            most = max(0, self.capacity * free // self.nbytes)
            raise ConfigError(
                f"replay.capacity: {self.config.capacity:,} steps take {self.nbytes / 2**30:.2f} GiB on each of "
                f"{self.devices} devices, of which {free / 2**30:.2f} GiB are free: at most {most:,} fit"
            )

    def init(self) -> ReplayState:
        """An empty replay."""
        unroll = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._unroll)
        # Its index is made from a Python number, whose weak type would have programs traced twice.
        buffer = jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), self._buffer.init(unroll))
        entries = jnp.zeros((self.rows, self.slots), jnp.int32)
        torn = () if self.stacks.frames is None else jnp.zeros((), jnp.int32)
        if not self.config.prioritised:
            return ReplayState(buffer, entries, (), (), (), torn)
        mass = jnp.zeros((*entries.shape, 1 if self.spec.unrolls else self.unroll_length), jnp.float32)
        return ReplayState(buffer, entries, mass, mass[..., 0], jnp.ones((), jnp.float32), torn)

    def insert(self, state: ReplayState, shard: Shard) -> ReplayState:
        """Put one unroll into each row, in place of the oldest; what can be drawn gets the largest priority so far."""
        slot, valid = state.buffer.current_index, self._entries(shard.trajectory.valid.T)
        held, torn = self._held(shard)
        entries = state.entries.at[:, slot].set(jnp.sum(valid, -1, dtype=jnp.int32))
        buffer = self._buffer.add(state.buffer, held)
        torn = jax.tree.map(jnp.add, state.torn, torn)
        state = state._replace(buffer=buffer, entries=entries, torn=torn)
        if not self.config.prioritised:
            return state
        mass = jnp.where(valid, state.largest_mass, 0.0)
        return state._replace(
            mass=state.mass.at[:, slot].set(mass), unroll_mass=state.unroll_mass.at[:, slot].set(jnp.sum(mass, -1))
        )

    def sample(self, state: ReplayState, rng: jax.Array, version: jax.Array) -> tuple[Sample | SampledUnrolls, Place]:
        """Draw `batch_size / D` transitions or unrolls, in strata (Schaul et al. 2016, appendix B.2.1).

        Args:
          state: of this device.
          rng: a key of this device.
          version: the learner's.
        """
        place, count = self._draw(state, rng, version)
        experience = state.buffer.experience
        # Invalid entries are never drawn, unless there are no others or a sum was rounded: those do not count.
        drawn = place.mass > 0
        weight = self._weight(place, count, version) if self.config.prioritised else jnp.asarray(drawn, jnp.float32)
        age = version - experience.policy_version[place.row, place.slot]
        if self.spec.unrolls:
            return SampledUnrolls(self._unrolls(experience.trajectory, place), weight, age), place
        return self._transitions(experience.trajectory, place, weight, age), place

    def reprioritise(self, state: ReplayState, place: Place, priority: jax.Array) -> ReplayState:
        """Give what was drawn the priorities `[S]` that the agent found, such as absolute temporal differences."""
        if not self.config.prioritised:
            return state
        row, slot, entry, before = place
        mass = (jnp.abs(priority) + SMALLEST_PRIORITY) ** self.config.alpha
        # What was never to be drawn stays so; what is not finite stays as it was.
        mass = jnp.where((before > 0) & jnp.isfinite(mass), mass, before)
        masses = state.mass.at[row, slot, entry].set(mass)
        unroll_mass = state.unroll_mass.at[row, slot].set(jnp.sum(masses[row, slot], -1))
        largest = jnp.maximum(state.largest_mass, jax.lax.pmax(jnp.max(mass), DATA_AXIS))
        return state._replace(mass=masses, unroll_mass=unroll_mass, largest_mass=largest)

    def _draw(self, state: ReplayState, rng: jax.Array, version: jax.Array) -> tuple[Place, "_Count"]:
        rng_unroll, rng_entry = jax.random.split(rng)
        entries = state.entries
        mass = state.unroll_mass if self.config.prioritised else entries.astype(jnp.float32)
        if self.config.max_lag is not None:
            young = version - state.buffer.experience.policy_version <= self.config.max_lag
            entries, mass = jnp.where(young, entries, 0), jnp.where(young, mass, 0.0)
        upto = jnp.cumsum(mass.reshape(-1))
        # One in each of so many equal parts of the whole.
        part = (jnp.arange(self.batch_size) + jax.random.uniform(rng_unroll, (self.batch_size,))) / self.batch_size
        unroll = jnp.minimum(jnp.searchsorted(upto, part * upto[-1], side="right"), mass.size - 1)
        row, slot = unroll // self.slots, unroll % self.slots
        if self.config.prioritised:
            within = state.mass[row, slot]
        else:
            within = self._entries(state.buffer.experience.trajectory.valid[row, slot]).astype(jnp.float32)
        upto_entry = jnp.cumsum(within, -1)
        at = jax.random.uniform(rng_entry, (self.batch_size, 1)) * upto_entry[:, -1:]
        entry = jnp.minimum(jnp.sum(upto_entry <= at, -1), within.shape[-1] - 1)
        chosen = jnp.take_along_axis(within, entry[:, None], -1)[:, 0]
        chosen = jnp.where(mass[row, slot] > 0, chosen, 0.0)
        return Place(row, slot, entry, chosen), _Count(jnp.sum(entries), upto[-1])

    def _held(self, shard: Shard) -> tuple[Shard, PyTree]:
        """What the buffer holds of a shard, leaves `[b, 1, ...]`, and how many stacks of frames that tears."""
        held = _by_row(shard)
        observation, torn = self.stacks.take_apart(held.trajectory.observation)
        return held._replace(trajectory=held.trajectory._replace(observation=observation)), torn

    def _entries(self, valid: jax.Array) -> jax.Array:
        """What can be drawn of unrolls, bool `[..., E]`; from their valid steps `[..., T]`."""
        return jnp.any(valid, -1, keepdims=True) if self.spec.unrolls else valid

    def _weight(self, place: Place, count: "_Count", version: jax.Array) -> jax.Array:
        """Importance weights `(N P(i)) ** -beta`, the largest of all devices 1 (Schaul et al. 2016, section 3.4)."""
        config = self.config
        beta = jnp.float32(config.beta)
        if config.beta_learner_steps is not None:
            beta += (1.0 - beta) * jnp.minimum(version / config.beta_learner_steps, 1.0)
        drawn = place.mass > 0
        # Each device draws as many: with a chance of 1 in D a sample is of this one.
        probability = place.mass / (count.mass * self.devices)
        number = jax.lax.psum(count.entries.astype(jnp.float32), DATA_AXIS)
        weight = jnp.where(drawn, (number * jnp.where(drawn, probability, 1.0)) ** -beta, 0.0)
        return weight / jnp.maximum(jax.lax.pmax(jnp.max(weight), DATA_AXIS), jnp.finfo(jnp.float32).tiny)

    def _transitions(self, trajectory: Trajectory, place: Place, weight: jax.Array, age: jax.Array) -> Sample:
        reward, discount, length = self._returns(trajectory, place)
        row, slot, step, _ = place
        return Sample(
            observation=self.stacks.at(trajectory.observation, row, slot, step),
            action=trajectory.action[row, slot, step],
            reward=reward,
            discount=discount,
            next_observation=self.stacks.at(trajectory.observation, row, slot, step + length),
            weight=weight,
            age=age,
        )

    def _unrolls(self, trajectory: Trajectory, place: Place) -> Trajectory:
        """Those that were drawn, time-major as they came."""
        row, slot = place.row, place.slot
        drawn = jax.tree.map(lambda x: x[row, slot], trajectory._replace(observation=()))
        moved: Trajectory = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), drawn._replace(state=()))
        steps = jnp.broadcast_to(jnp.arange(self.unroll_length + 1)[:, None], (self.unroll_length + 1, len(row)))
        return moved._replace(state=drawn.state, observation=self.stacks.at(trajectory.observation, row, slot, steps))

    def _returns(self, trajectory: Trajectory, place: Place) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Sum of discounted rewards over up to `n` steps, discount of what follows, and how many steps: `[S]` each.

        Steps count up to the first that ends the episode, before the first that only resets the environment, and
        within the unroll.
        """
        spec = self.spec
        later = place.entry[:, None] + jnp.arange(spec.n_step)
        at = (place.row[:, None], place.slot[:, None], jnp.minimum(later, self.unroll_length - 1))
        reward, terminated = trajectory.reward[at], trajectory.terminated[at]
        valid = trajectory.valid[at] & (later < self.unroll_length)
        on = jnp.cumprod(valid & ~terminated & ~trajectory.truncated[at], axis=-1, dtype=jnp.int32) > 0
        counts = valid & jnp.concatenate([jnp.ones_like(on[:, :1]), on[:, :-1]], axis=-1)
        if spec.reward_clip is not None:
            reward = jnp.clip(reward, -spec.reward_clip, spec.reward_clip)
        discounts = jnp.asarray(spec.discount ** np.arange(spec.n_step), jnp.float32)
        length = jnp.sum(counts, -1, dtype=jnp.int32)
        beyond = jnp.float32(spec.discount) ** length
        ended = jnp.any(counts & terminated, -1)
        return jnp.sum(jnp.where(counts, reward, 0.0) * discounts, -1), jnp.where(ended, 0.0, beyond), length


class _Count(NamedTuple):
    """On this device: how much can be drawn, and its mass."""

    entries: jax.Array
    mass: jax.Array


def _structs(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), tree)


def _by_row(shard: Shard) -> Shard:
    """Leaves `[b, 1, ...]`: environments, one unroll of each, then steps; from time-major ones."""
    trajectory = shard.trajectory
    moved = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0)[:, None], trajectory._replace(state=()))
    moved = moved._replace(state=jax.tree.map(lambda x: x[:, None], trajectory.state))
    return Shard(moved, shard.policy_version[:, None])


def _free_memory(device: jax.Device) -> int:
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return int(psutil.virtual_memory().available) if device.platform == "cpu" else math.inf  # type: ignore[return-value]
