"""The update of a configuration, compiled and measured without being run."""

import time
from typing import Any

import jax

from tianji_jax.agent import Agent, ReplayAgent
from tianji_jax.blueprint import Blueprint, plan
from tianji_jax.chips import Topology, find_gpu
from tianji_jax.config import Config, ConfigError
from tianji_jax.console import heading
from tianji_jax.device_queue import BatchAssembler
from tianji_jax.estimate import Machine, Memory, Work, estimate
from tianji_jax.flops import count_flops
from tianji_jax.hlo import padded_bytes, traffic
from tianji_jax.learner import UPDATES_HELD, init_state
from tianji_jax.learning import on_policy_update
from tianji_jax.parallel import Parallel, described_devices, learner_devices
from tianji_jax.types import PyTree
from tianji_jax.world import World


class DoesNotFitError(RuntimeError):
    """The compiler found that the update needs more memory than a device has."""


def measure(config: Config, topology: Topology | None) -> dict[str, Any]:
    """Compile the update that each learner would run, and tell what it needs (`estimate`).

    `learner.trajectories_per_update` and `actors.*` are those of each host, as they are with `tianji learner`.

    Args:
      config: of the run.
      topology: a slice of a TPU pod, which need not be there; None for the devices that `learner.platform` and
        `learner.devices` ask for on this machine.

    Raises:
      ConfigError: the configuration cannot run there.
      DoesNotFitError: the update needs more memory than there is.
    """
    devices = learner_devices(config.learner) if topology is None else described_devices(topology, config.learner)
    hosts = len({device.process_index for device in devices})
    blueprint = plan(config, World(0, hosts))
    if isinstance(blueprint.agent, ReplayAgent):
        raise ConfigError(
            f"agent.name: {config.agent['name']} learns from replay; `tianji compile` is for agents that learn from "
            "each trajectory as it comes, such as impala and ppo"
        )
    if hosts > 1 and config.balance.max_reuse:
        raise ConfigError(
            f"balance.max_reuse={config.balance.max_reuse} does not go with several learners, and this slice has "
            f"{hosts} hosts with one each: set balance.max_reuse=0"
        )
    # pmap is for devices that are there, and compiles to the same program.
    parallel = Parallel(devices, "shard_map")
    return _measure(blueprint, parallel, _machine(devices, hosts, topology))


def _measure(blueprint: Blueprint, parallel: Parallel, machine: Machine) -> dict[str, Any]:
    config, agent = blueprint.config, blueprint.agent
    state = parallel.spec(jax.eval_shape(lambda: init_state(agent, config.run.seed)))
    try:
        assembler = BatchAssembler(blueprint.trajectory, config.learner.trajectories_per_update, len(parallel.local))
        shard = assembler.shard_spec(blueprint.trajectory)
        step, batch = on_policy_update(blueprint, shard)
        traced = parallel.trace(step, state, batch)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    began = time.monotonic()
    compiled = _compiled(traced.lower())
    seconds = time.monotonic() - began
    work = Work(
        flops=count_flops(traced.jaxpr),
        traffic=traffic(compiled.as_text()),
        steps=config.steps_per_update * machine.hosts,
        frame_skip=blueprint.env_spec.frame_skip,
        batch=len(parallel.local) * sum(spec.nbytes for spec in jax.tree.leaves(batch)),
    )
    memory = memory_of(compiled, state, agent, config.learner.queue_capacity)
    return {"run": heading(config), **estimate(machine, memory, work), "compile_seconds": seconds}


def _compiled(lowered: Any) -> Any:
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        if "RESOURCE_EXHAUSTED" not in message:
            raise
        raise DoesNotFitError(message.removeprefix("RESOURCE_EXHAUSTED: ").splitlines()[0]) from error


def _machine(devices: list[jax.Device], hosts: int, topology: Topology | None) -> Machine:
    if topology is not None:
        name = f"{topology.chip.name}, {topology.name}"
        return Machine(name, topology.chip, topology.chip.memory, len(devices), hosts, topology.ring_links)
    kind = devices[0].device_kind
    chip = find_gpu(kind)
    # What a GPU's programs may have depends on what JAX was told to take. A CPU's devices share the host's memory.
    memory = None if devices[0].platform == "cpu" else (devices[0].memory_stats() or {}).get("bytes_limit")
    if chip is None:
        return Machine("CPU" if devices[0].platform == "cpu" else kind, None, memory, len(devices), hosts)
    return Machine(chip.name, chip, memory, len(devices), hosts, chip.links)


def memory_of(compiled: Any, state: PyTree, agent: Agent, queue_capacity: int) -> Memory:
    """What a run of a compiled update keeps on each device.

    Args:
      compiled: of `(state, batch) -> (state, outputs)`, the state donated.
      state: its spec.
      agent: whose update it is.
      queue_capacity: batches held ready.
    """
    analysis = compiled.memory_analysis()
    sizes = jax.tree.leaves(jax.tree.map(_on_device, state, compiled.input_formats[0][0]))
    # The training state stands first in the learner's.
    acting = sum(sizes[index] for index in _acting(agent, state.train_state))
    batch = analysis.argument_size_in_bytes - sum(sizes)
    return Memory(
        parameters=acting,
        optimiser=sum(sizes) - acting,
        queue=queue_capacity * batch,
        # One waits for its place in the queue.
        in_flight=(1 + UPDATES_HELD) * batch,
        outputs=UPDATES_HELD * (analysis.output_size_in_bytes - analysis.alias_size_in_bytes),
        checkpoint=sum(sizes),
        temporaries=analysis.temp_size_in_bytes,
        program=analysis.generated_code_size_in_bytes,
    )


def _on_device(spec: jax.ShapeDtypeStruct, form: Any) -> float:
    """Bytes of an argument; 0 of one that the program does not use."""
    if form is None or form.layout is None:
        return 0.0
    if jax.dtypes.issubdtype(spec.dtype, jax.dtypes.prng_key):
        spec = jax.eval_shape(jax.random.key_data, spec)
    tile = form.layout.tiling[0] if form.layout.tiling and spec.shape else ()
    return padded_bytes(spec.shape, spec.dtype.itemsize, form.layout.major_to_minor, tile)


def _acting(agent: Agent, train_state: PyTree) -> list[int]:
    """Which leaves of the training state `actor_params` looks at."""
    jaxpr = jax.make_jaxpr(agent.actor_params)(train_state).jaxpr
    used = [*jaxpr.outvars, *(var for equation in jaxpr.eqns for var in equation.invars)]
    return [index for index, var in enumerate(jaxpr.invars) if any(var is other for other in used)]
