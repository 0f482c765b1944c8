"""The one place that names devices, meshes, pmap and shard_map.

The devices may be those of several hosts, each with a process of its own (`world`): then every process makes the same
calls in the same order, with the batch of its own devices.

A program here is a function of one device's view, `step(state, batch) -> (state, outputs)`: the state is the same on
every device, the batch is this device's shard, and what it returns must again be the same on every device (average
over `DATA_AXIS` with `jax.lax.pmean`). Under either mode the arrays outside look alike: states are replicated, batches
carry a leading device dimension `[D, ...]`. Other programs take and give other things than these (`Places`).
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from tianji_jax.chips import Topology
from tianji_jax.config import ConfigError, LearnerConfig
from tianji_jax.types import DATA_AXIS, ArraySpec, PyTree

logger = logging.getLogger(__name__)

Step = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]


class Places(NamedTuple):
    """Where the arguments and the results (always a tuple) of a program lie.

    Attributes:
      arguments: for each whether every device has its own, an array `[D, ...]` outside, or all have the same.
      results: likewise.
      donated: arguments whose memory the results take over: the caller must not read what it has passed in there.
    """

    arguments: tuple[bool, ...]
    results: tuple[bool, ...]
    donated: tuple[int, ...] = (0,)


STATE_AND_BATCH = Places((False, True), (False, False))
"""Of a `Step`."""


def learner_devices(config: LearnerConfig) -> list[jax.Device]:
    """The devices that the configuration asks for, as many on each host; those of one host stand together.

    Raises:
      ConfigError: there are none of that kind, or not as many.
    """
    try:
        everywhere = jax.devices(None if config.platform == "auto" else config.platform)
    except RuntimeError:
        found = jax.default_backend()
        raise ConfigError(
            f"learner.platform: {config.platform} asked for, but JAX finds only {found} on this machine; "
            f"install the matching extra (tianji_jax[cuda] or [tpu]) or set learner.platform={found}"
        ) from None
    return _as_many_on_each_host(everywhere, config)


def described_devices(topology: Topology, config: LearnerConfig) -> list[jax.Device]:
    """As `learner_devices`, of a slice of a TPU pod that need not be there: to compile for, by libtpu.

    Raises:
      ConfigError: a host of it has not as many.
    """
    slice_ = topologies.get_topology_desc(
        topology.name,
        "tpu",
        chips_per_host_bounds=topology.host_shape,
        # One device of the two cores of a chip, as JAX has it there.
        chip_config_name="megacore" if len(topology.shape) == 3 else "default",
        wrap=(*topology.wraps, False)[:3],
    )
    return _as_many_on_each_host(slice_.devices, config)


def _as_many_on_each_host(everywhere: Sequence[jax.Device], config: LearnerConfig) -> list[jax.Device]:
    hosts: dict[int, list[jax.Device]] = {}
    for device in everywhere:
        hosts.setdefault(device.process_index, []).append(device)
    count = config.devices or len(everywhere) // len(hosts)
    for rank, devices in sorted(hosts.items()):
        if count > len(devices):
            where = f" on learner {rank}" if len(hosts) > 1 else ""
            raise ConfigError(
                f"learner.devices: {count} asked for, but there are {len(devices)} {devices[0].platform} devices{where}"
            )
    return [device for _, devices in sorted(hosts.items()) for device in devices[:count]]


def actor_device(where: Literal["cpu", "accelerator"], learner: Sequence[jax.Device], actor_id: int) -> jax.Device:
    """The device an actor's policy runs on; on accelerators the actors take turns."""
    return jax.local_devices(backend="cpu")[0] if where == "cpu" else learner[actor_id % len(learner)]


class Parallel:
    """The learner's devices as one program's."""

    def __init__(self, devices: Sequence[jax.Device], mode: Literal["pmap", "shard_map"]) -> None:
        self.devices = list(devices)
        self.local = [device for device in self.devices if device.process_index == jax.process_index()]
        self.mode = mode
        self.mesh = Mesh(np.array(self.devices), (DATA_AXIS,))
        self._replicated = NamedSharding(self.mesh, PartitionSpec())
        self._sharded = NamedSharding(self.mesh, PartitionSpec(DATA_AXIS))

    @property
    def num_devices(self) -> int:
        """`D`, the number of shards of a batch."""
        return len(self.devices)

    def init(self, make: Callable[..., PyTree], *arguments: Any) -> PyTree:
        """Compute a state once, in place on every device.

        Args:
          make: returns it.
          arguments: for `make`, the same on every host. A seed belongs here: within `make` it would be a constant, and
            each seed a program of its own to compile.
        """
        return jax.jit(make, out_shardings=self._replicated)(*arguments)

    def replicate(self, tree: PyTree) -> PyTree:
        """Put host arrays, the same on every host, on every device."""
        return jax.device_put(tree, self._replicated)

    def spec(self, state: PyTree) -> PyTree:
        """The shapes of a state, with where it lies, as `jax.ShapeDtypeStruct`."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._replicated), state)

    def copier(self, state: PyTree, part: Callable[[PyTree], PyTree] = lambda x: x) -> Callable[[PyTree], PyTree]:
        """A compiled function that copies a state into buffers of its own on one device, which no update overwrites.

        Args:
          state: its `spec`.
          part: what of the state to copy, or anything computed from it.
        """
        device = SingleDeviceSharding(self.local[0])
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), state)
        compiled = jax.jit(lambda state: jax.tree.map(jnp.copy, part(state))).lower(one).compile()

        def copy(state: PyTree) -> PyTree:
            # Every device holds the same. Other processes need not take part in looking at one's own.
            return compiled(jax.tree.map(lambda x: x.addressable_shards[0].data, state))

        return copy

    def changer(
        self, change: Callable[[PyTree, PyTree], PyTree], state: PyTree, by: PyTree
    ) -> Callable[[PyTree, PyTree], PyTree]:
        """`change(state, by)` compiled: the state is replaced in place, on every device the same.

        Args:
          change: returns the new state.
          state: its `spec`.
          by: spec of what it is changed by, which every device has too (`replicate`).
        """
        return jax.jit(change, donate_argnums=0, out_shardings=self._replicated).lower(state, self.spec(by)).compile()

    def shard(self, shards: Sequence[PyTree]) -> PyTree:
        """Begin the transfer of one host pytree per local device; leaves `[...]` become global arrays `[D, ...]`.

        The host arrays must not be written again: on CPU the device may share their memory.
        """
        leaves = [jax.tree.leaves(shard) for shard in shards]
        treedef = jax.tree.structure(shards[0])
        return jax.tree.unflatten(treedef, [self._global(parts) for parts in zip(*leaves, strict=True)])

    def init_own(self, make: Callable[[], PyTree]) -> PyTree:
        """Compute a state on every device that is to have its own; leaves `[...]` become `[D, ...]`."""

        def each() -> PyTree:
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.num_devices, *x.shape)), make())

        return jax.jit(each, out_shardings=self._sharded)()

    def own_spec(self, tree: PyTree) -> PyTree:
        """As `spec`, of what every device has its own: `[D, ...]` for `ArraySpec` leaves of one device's `[...]`."""
        return jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct((self.num_devices, *spec.shape), spec.dtype, sharding=self._sharded), tree
        )

    def lower(self, step: Callable[..., Any], *arguments: PyTree, places: Places = STATE_AND_BATCH) -> Any:
        """Trace `step` for one shape only; `compile()` of what is returned gives a function that can never recompile.

        Args:
          step: see the module.
          arguments: the `spec` of each that all devices have the same, such as a state; pytree of `ArraySpec` of one
            device's part of each that they have their own, such as a batch.
          places: which is which.
        """
        specs = self._specs(arguments, places)
        if self.mode == "pmap" and len(self.local) < self.num_devices:
            # Over several hosts pmap takes shapes only from arrays.
            for index, own in enumerate(places.arguments):
                sharding = self._sharded if own else self._replicated
                specs[index] = jax.jit(lambda spec=specs[index]: _zeros(spec), out_shardings=sharding)()
        return self._program(step, places).lower(*specs)

    def trace(self, step: Callable[..., Any], *arguments: PyTree, places: Places = STATE_AND_BATCH) -> Any:
        """As `lower`, a step earlier (`jax.stages.Traced`): the program as JAX sees it. Under `shard_map` only."""
        return self._program(step, places).trace(*self._specs(arguments, places))

    def _specs(self, arguments: Sequence[PyTree], places: Places) -> list[PyTree]:
        return [self.own_spec(spec) if own else spec for spec, own in zip(arguments, places.arguments, strict=True)]

    def _program(self, step: Callable[..., Any], places: Places) -> Any:
        if self.mode == "pmap":
            return jax.pmap(
                step,
                DATA_AXIS,
                in_axes=tuple(0 if own else None for own in places.arguments),
                out_axes=tuple(0 if own else None for own in places.results),
                devices=self.devices,
                donate_argnums=places.donated,
            )

        def part(*arguments: PyTree) -> tuple[PyTree, ...]:
            given = zip(arguments, places.arguments, strict=True)
            mine = [jax.tree.map(lambda x: x[0], x) if own else x for x, own in given]
            results = zip(step(*mine), places.results, strict=True)
            return tuple(jax.tree.map(lambda x: x[None], x) if own else x for x, own in results)

        # Without check_vma=False the gradient of a replicated value arrives already summed over the devices, and
        # pmean of it would be D times too large; with it, shard_map means what pmap means.
        return jax.jit(
            jax.shard_map(
                part,
                mesh=self.mesh,
                in_specs=tuple(PartitionSpec(DATA_AXIS) if own else PartitionSpec() for own in places.arguments),
                out_specs=tuple(PartitionSpec(DATA_AXIS) if own else PartitionSpec() for own in places.results),
                check_vma=False,
            ),
            donate_argnums=places.donated,
        )

    def _global(self, parts: Sequence[np.ndarray]) -> jax.Array:
        arrays = [jax.device_put(part[None], device) for part, device in zip(parts, self.local, strict=True)]
        shape = (self.num_devices, *parts[0].shape)
        return jax.make_array_from_single_device_arrays(shape, self._sharded, arrays)


def _zeros(spec: PyTree) -> PyTree:
    def zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), x.shape)
        return jnp.zeros(x.shape, x.dtype)

    return jax.tree.map(zeros, spec)


def spec_of(tree: PyTree) -> PyTree:
    """`ArraySpec` leaves for arrays, or for what `jax.eval_shape` returns."""
    return jax.tree.map(lambda x: ArraySpec(x.shape, x.dtype), tree)


def use_compilation_cache(folder: Path | None) -> None:
    """Keep compiled programs in `folder`, so that the next run starts in seconds."""
    if folder is None:
        return
    folder = folder.expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("run.compilation_cache: cannot use %s (%s); every run compiles anew", folder, error.strerror)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
