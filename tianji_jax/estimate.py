"""What a compiled update needs of its devices, how fast it can be at best, and what it asks of the actors."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tianji_jax.chips import Chip, wire_bytes
from tianji_jax.hlo import Traffic

SHORT = 1e-3
"""Seconds: to start the parts of a program, and to wait for other devices, takes some of that already."""


@dataclass(frozen=True)
class Machine:
    """What an update is compiled for.

    Attributes:
      name: for people.
      chip: limits of a device; None where they are not known, as those of a CPU are not.
      memory: bytes of a device that programs may have; None where that is not known.
      devices: all that take part.
      hosts: that they belong to.
      links: of a device, by which it sends at once in a collective.
    """

    name: str
    chip: Chip | None
    memory: int | None
    devices: int
    hosts: int = 1
    links: int = 1


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, with the padding that its layouts take.

    Attributes:
      parameters: what acting needs of the training state.
      optimiser: the rest of the learner's state.
      queue: batches that lie ready.
      in_flight: batches on their way to the queue and in updates.
      outputs: what updates leave for the host to fetch.
      checkpoint: a copy of the state, to be saved.
      temporaries: of the update.
      program: its code.
    """

    parameters: float
    optimiser: float
    queue: float
    in_flight: float
    outputs: float
    checkpoint: float
    temporaries: float
    program: float

    @property
    def total(self) -> float:
        """The sum."""
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Work:
    """What one update takes.

    Attributes:
      flops: of a device, in matrix products and convolutions.
      traffic: of a device.
      steps: environment steps that all devices learn from.
      frame_skip: frames of a step.
      batch: bytes of it that one host takes in.
    """

    flops: float
    traffic: Traffic
    steps: int
    frame_skip: int
    batch: float


def estimate(machine: Machine, memory: Memory, work: Work) -> dict[str, Any]:
    """The figures of `tianji compile`, as JSON values.

    The roofline (Williams et al. 2009): an update takes at least as long as its operations at the peak of the chip, as
    its traffic at the memory's bandwidth, and as its collectives on the links. What of it cannot be known is None.
    """
    payload = dict(work.traffic.payload)
    sent = sum(wire_bytes(op, size, machine.devices) for op, size in payload.items())
    report: dict[str, Any] = {
        "machine": machine.name,
        "devices": machine.devices,
        "hosts": machine.hosts,
        "memory": {**asdict(memory), "sum": memory.total, "available": machine.memory},
        "fits": None if machine.memory is None else memory.total <= machine.memory,
        "flops": work.flops,
        "bytes_accessed": work.traffic.memory,
        "collective_bytes": sum(payload.values()),
        "collective_bytes_sent": sent,
        "collectives": work.traffic.collectives,
        "steps_per_update": work.steps,
        "seconds": None,
        "limited_by": None,
        "updates_per_second": None,
        "environment_steps_per_second": None,
        "frames_per_second": None,
        "bytes_per_second_and_host": None,
    }
    if (chip := machine.chip) is not None:
        seconds = {
            "compute": work.flops / chip.flops,
            "memory": work.traffic.memory / chip.bandwidth,
            "interconnect": sent / (chip.link * machine.links) if sent else 0.0,
        }
        limit = max(seconds, key=lambda name: seconds[name])
        rate = 1 / seconds[limit]
        report |= {
            "seconds": seconds,
            "limited_by": limit,
            "updates_per_second": rate,
            "environment_steps_per_second": rate * work.steps,
            "frames_per_second": rate * work.steps * work.frame_skip,
            "bytes_per_second_and_host": rate * work.batch,
        }
    return report


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The figures for people; `report` also has the `run` they are of."""
    each = "each" if report["devices"] > 1 else "the"
    everywhere = " of all hosts" if report["hosts"] > 1 else ""
    yield report["run"]
    yield f"{report['machine']}: {_count(report['devices'], 'device')} on {_count(report['hosts'], 'host')}"
    yield f"an update learns from {report['steps_per_update']:,} environment steps{everywhere}"
    yield ""
    memory = report["memory"]
    unit, size = ("MiB", 2**20) if memory["sum"] > 10 * 2**20 else ("KiB", 2**10)
    yield f"memory of {each} device, {unit}"
    for name, what in _MEMORY.items():
        yield f"  {what:<46}{memory[name] / size:>12,.1f}"
    yield f"  {'sum':<46}{memory['sum'] / size:>12,.1f}  {_verdict(report)}"
    yield ""
    yield f"work of {each} device in an update"
    yield from _work(report)
    yield ""
    yield from _rates(report)


_MEMORY = {
    "parameters": "parameters",
    "optimiser": "optimiser and the rest of the training state",
    "queue": "batches ready (learner.queue_capacity)",
    "in_flight": "batches on their way and in updates",
    "temporaries": "temporaries of an update",
    "outputs": "parameters and metrics on their way out",
    "checkpoint": "copy of the training state for a checkpoint",
    "program": "program",
}

_LIMITS = {"compute": "its operations", "memory": "its memory traffic", "interconnect": "its collectives"}


def _verdict(report: Mapping[str, Any]) -> str:
    available = report["memory"]["available"]
    if available is None:
        return "(how much there is is not known here)"
    share = report["memory"]["sum"] / available
    return f"{'fits' if report['fits'] else 'DOES NOT FIT'}: {share:.1%} of {available / 2**30:,.2f} GiB"


def _work(report: Mapping[str, Any]) -> Iterator[str]:
    collectives = _count(report["collectives"], "collective")
    for name, what in (
        ("compute", _si(report["flops"], "FLOP")),
        ("memory", f"{_si(report['bytes_accessed'], 'B')} read and written"),
        ("interconnect", f"{_si(report['collective_bytes'], 'B')} in {collectives}"),
    ):
        line = f"  {name:<14}{what:<32}"
        if report["seconds"] is not None:
            line += f"{_si(report['seconds'][name], 's'):>9}{'  limits' if report['limited_by'] == name else ''}"
        yield line.rstrip()


def _rates(report: Mapping[str, Any]) -> Iterator[str]:
    rate = report["updates_per_second"]
    if rate is None:
        yield "no estimate of the rate: the peaks of these devices are not known here"
        return
    steps, hosts = report["environment_steps_per_second"], report["hosts"]
    yield f"at best {_rate(rate)} updates/s, if nothing but {_LIMITS[report['limited_by']]} held it up; then it takes"
    yield f"  {_rate(steps)} environment steps/s ({_rate(report['frames_per_second'])} frames/s) from the actors"
    if hosts > 1:
        yield f"  {_rate(steps / hosts)} environment steps/s on each host"
    transfer = _si(report["bytes_per_second_and_host"], "B")
    yield f"  {transfer}/s from {'each' if hosts > 1 else 'the'} host to its devices"
    if rate * SHORT > 1:
        yield "latencies do not count here: an update as short as this one takes longer"


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _si(number: float, unit: str) -> str:
    """Three digits and a prefix: `318 GFLOP`, `4.1 us`."""
    if number == 0:
        return f"0 {unit}"
    power = max(-3, min(5, math.floor(math.log10(number) / 3)))
    return f"{number / 1000**power:.{3 if number / 1000**power < 1000 else 4}g} {_PREFIXES[power]}{unit}"


_PREFIXES = {-3: "n", -2: "u", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T", 5: "P"}


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
