"""What a compiled update needs of its devices, how fast it can be at best, and what it asks of the actors."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tianji_jax.chips import Chip, wire_bytes
from tianji_jax.hlo import Traffic

MIB = 2**20


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
    many = report["devices"] > 1
    yield report["run"]
    yield f"{report['machine']}: {_count(report['devices'], 'device')} on {_count(report['hosts'], 'host')}"
    yield f"an update learns from {report['steps_per_update']:,} environment steps{' of all hosts' if report['hosts'] > 1 else ''}"
    yield ""
    yield f"memory of {'each' if many else 'the'} device, MiB"
    memory = report["memory"]
    for name, what in _MEMORY.items():
        yield f"  {what:<46} {memory[name] / MIB:>12,.1f}"
    yield f"  {'sum':<46} {memory['sum'] / MIB:>12,.1f}  {_verdict(report)}"
    yield ""
    yield f"work of {'each' if many else 'the'} device in an update"
    seconds = report["seconds"] or {}
    for name, what in (
        ("compute", f"{report['flops'] / 1e9:,.2f} GFLOP"),
        ("memory", f"{report['bytes_accessed'] / 1e6:,.2f} MB read and written"),
        ("interconnect", f"{report['collective_bytes'] / 1e6:,.2f} MB in {_count(report['collectives'], 'collective')}"),
    ):
        time = f"{seconds[name] * 1e3:>12,.3f} ms" if seconds else ""
        yield f"  {name:<13} {what:<32} {time}{'  limits' if report['limited_by'] == name else ''}".rstrip()
    yield ""
    if not seconds:
        yield "no estimate of the rate: the peaks of these devices are not known here"
        return
    yield f"at best {report['updates_per_second']:,.1f} updates/s, if nothing but {_LIMITS[report['limited_by']]} held it up;"
    yield (
        f"for that the actors have to deliver {report['environment_steps_per_second']:,.0f} environment steps/s "
        f"({report['frames_per_second']:,.0f} frames/s)"
    )
    if report["hosts"] > 1:
        yield f"  on each host {report['environment_steps_per_second'] / report['hosts']:,.0f} environment steps/s"
    yield f"  {report['bytes_per_second_and_host'] / 1e6:,.1f} MB/s from each host to its devices"


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
        return "how much there is is not known here"
    share = report["memory"]["sum"] / available
    return f"of {available / MIB:,.0f}: {'fits' if report['fits'] else 'DOES NOT FIT'} ({share:.0%})"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
