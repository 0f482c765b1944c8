"""Replays on virtual devices for tests, filled with unrolls in which every observation is another number."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from tianji_jax.agent import ReplaySpec
from tianji_jax.device_queue import Shard
from tianji_jax.parallel import Parallel, Places
from tianji_jax.replay import Place, Replay
from tianji_jax.replay_config import ReplayConfig
from tianji_jax.types import ArraySpec, DiscreteActions, EnvSpec, Trajectory, trajectory_spec


class Transition(NamedTuple):
    """What is to be drawn from one step on, by the rules of the environment; as `Sample`."""

    reward: float
    discount: float
    next_observation: float


def random_shard(
    rng: np.random.Generator,
    steps: int,
    rows: int,
    first: int,
    *,
    version: int = 0,
    pixels: int = 1,
    recurrent: bool = False,
) -> Shard:
    """Unrolls in the midst of episodes: each ends with a chance of 1 in 4, in one of both ways, and resets then."""
    done = np.zeros((steps, rows), bool)
    valid = np.ones((steps, rows), bool)
    valid[0] = rng.random(rows) < 0.8
    for t in range(steps):
        if t > 0:
            valid[t] = ~done[t - 1]
        done[t] = valid[t] & (rng.random(rows) < 0.25)
    terminated = done & (rng.random(done.shape) < 0.5)
    numbers = first + np.arange((steps + 1) * rows, dtype=np.float32).reshape(steps + 1, rows)
    trajectory = Trajectory(
        observation={"number": numbers, "pixel": np.stack([numbers % 256] * pixels, -1).astype(np.uint8)},
        is_first=np.concatenate([~valid, np.zeros((1, rows), bool)]),
        action=rng.integers(0, 5, (steps, rows), np.int32),
        # What an invalid step holds must not matter.
        reward=np.where(valid, rng.normal(size=valid.shape), np.nan).astype(np.float32),
        terminated=terminated,
        truncated=done & ~terminated,
        valid=valid,
        extras={},
        state={"carry": -numbers[0]} if recurrent else (),
    )
    return Shard(trajectory, np.full(rows, version, np.int32))


def transitions(shard: Shard, spec: ReplaySpec) -> Iterator[tuple[float, Transition]]:
    """Every valid step by the number of its observation, and what follows: played one step after another."""
    trajectory = shard.trajectory
    steps, rows = trajectory.reward.shape
    for row in range(rows):
        for start in range(steps):
            if not trajectory.valid[start, row]:
                continue
            total, discount, t = 0.0, 1.0, start
            while True:
                total += discount * float(trajectory.reward[t, row])
                discount *= spec.discount
                t += 1
                ended, cut = trajectory.terminated[t - 1, row], trajectory.truncated[t - 1, row]
                if ended or cut or t == steps or t - start == spec.n_step or not trajectory.valid[t, row]:
                    break
            numbers = trajectory.observation["number"][:, row]
            yield float(numbers[start]), Transition(total, 0.0 if ended else discount, float(numbers[t]))


class Rig:
    """A replay on `D` virtual devices."""

    def __init__(
        self,
        devices: int,
        config: ReplayConfig,
        spec: ReplaySpec,
        *,
        steps: int = 6,
        rows: int = 3,
        mode: Any = "pmap",
        held: bool = True,
        pixels: int = 1,
    ) -> None:
        """`held` False leaves it to the caller to make the replay's state; observations have so many `pixels`."""
        self.parallel = Parallel(jax.devices()[:devices], mode)
        observation = {"number": ArraySpec((), np.float32), "pixel": ArraySpec((pixels,), np.uint8)}
        env_spec = EnvSpec("numbers", observation, DiscreteActions(5))
        state_spec = {"carry": ArraySpec((), np.float32)} if spec.unrolls else ()
        trajectory = trajectory_spec(env_spec, steps, rows, {}, state_spec)
        self.shard_spec = Shard(trajectory, ArraySpec((rows,), np.int32))
        self.replay = replay = Replay(config, spec, self.shard_spec, devices)
        number = jax.ShapeDtypeStruct((), np.int32)
        state = replay.state_spec

        def sample(seed: jax.Array, version: jax.Array, held: Any) -> Any:
            rng = jax.random.fold_in(jax.random.key(seed), jax.lax.axis_index("data"))
            return replay.sample(held, rng, version)

        compiled = self.parallel.lower(
            sample,
            *self.parallel.spec((number, number)),
            state,
            places=Places((False, False, True), (True, True), ()),
        ).compile()
        self._sample, self._draws = compiled, 0
        self._insert = self.parallel.lower(
            lambda held, shard: (replay.insert(held, shard),),
            state,
            self.shard_spec,
            places=Places((True, True), (True,)),
        ).compile()
        place = Place(*(ArraySpec((replay.batch_size,), dtype) for dtype in ("i4", "i4", "i4", "f4")))
        self._reprioritise = self.parallel.lower(
            lambda held, place, priority: (replay.reprioritise(held, place, priority),),
            state,
            place,
            place.mass,
            places=Places((True, True, True), (True,)),
        ).compile()

        self.held: Any = self.parallel.init_own(replay.init) if held else None

    def insert(self, *shards: Shard) -> None:
        """One shard for each device."""
        (self.held,) = self._insert(self.held, self.parallel.shard(shards))

    def sample(self, version: int = 0) -> tuple[Any, Place]:
        """The next draw, a `Sample` or `SampledUnrolls` of NumPy arrays `[D, ...]`."""
        self._draws += 1
        seed, now = self.parallel.replicate((np.int32(self._draws), np.int32(version)))
        return jax.device_get(self._sample(seed, now, self.held))

    def reprioritise(self, place: Place, priority: np.ndarray) -> None:
        """Set priorities `[D, S]` of what was drawn."""
        parts = [(Place(*(x[device] for x in place)), priority[device]) for device in self.range]
        (self.held,) = self._reprioritise(self.held, *self.parallel.shard(parts))

    @property
    def range(self) -> range:
        """Of the devices."""
        return range(self.parallel.num_devices)
