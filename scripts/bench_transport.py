"""How fast trajectories travel, against copying the same bytes in memory.

    python scripts/bench_transport.py [--seconds 0.5] [--repeats 5]

One thread sends, one receives, in one process; every trajectory has a credit, and two are under way. Prints the median
over the repeats, and the machine's load beside it: with other work on the machine the numbers are of little worth.
"""

import argparse
import contextlib
import os
import statistics
import threading
import time

import numpy as np
import zmq
from rich.console import Console
from rich.table import Table

from tianji_jax.transport import (
    Arrived,
    Codec,
    Credit,
    Joined,
    Requested,
    TrajectoryClient,
    TrajectoryServer,
    local_address,
)
from tianji_jax.types import ArraySpec, DiscreteActions, EnvSpec, Stamp, trajectory_spec

SIZES = {"16 KB": 16 * 1024, "1 MB": 1024**2, "16 MB": 16 * 1024**2}
UNDER_WAY = 2
UNROLL_LENGTH, ENVIRONMENTS = 16, 8


def make_codec(size: int) -> Codec:
    """For trajectories of about `size` bytes."""
    per_step = size // ((UNROLL_LENGTH + 1) * ENVIRONMENTS)
    env = EnvSpec("bench", ArraySpec((per_step,), np.dtype(np.uint8)), DiscreteActions(2))
    return Codec(trajectory_spec(env, UNROLL_LENGTH, ENVIRONMENTS, {}, ()), {})


def act(client: TrajectoryClient, codec: Codec, stop: threading.Event) -> None:
    """Send the same trajectory for every credit; nothing writes to it, so sharing its memory is safe."""
    trajectory = type(codec.spec)(*(np.zeros(s.shape, s.dtype) if isinstance(s, ArraySpec) else s for s in codec.spec))
    sequence = 0
    client.hello(stop, 10)
    for _ in range(UNDER_WAY):
        client.request()
    while not stop.is_set():
        if client.credit(0.1) is not None:
            client.send(Stamp(0, 0, sequence), trajectory, [], {})
            client.request()
            sequence += 1
    client.close()


def trajectories_per_second(address: str, codec: Codec, seconds: float) -> float:
    """Rate of arrival at `address`."""
    context, stop = zmq.Context(), threading.Event()
    server = TrajectoryServer(address, codec, context)
    client = TrajectoryClient(server.endpoint, 0, codec, context)
    actor = threading.Thread(target=act, args=(client, codec, stop))
    actor.start()
    arrived, began = 0, 0.0
    while not began or time.perf_counter() - began < seconds:
        for event in server.poll(0.1):
            match event:
                case Requested(actor_id):
                    server.grant(actor_id, Credit(0))
                case Arrived():
                    began = began or time.perf_counter()  # the first one starts the clock
                    arrived += 1
                case Joined():
                    pass
                case _:
                    raise RuntimeError(f"unexpected {event}")
    rate = (arrived - 1) / (time.perf_counter() - began)
    stop.set()
    actor.join()
    server.close()
    context.term()
    return rate


def copies_per_second(size: int, seconds: float) -> float:
    """How often `size` bytes can be copied in memory."""
    source, target, copies = np.ones(size, np.uint8), np.empty(size, np.uint8), 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        np.copyto(target, source)
        copies += 1
    return copies / (time.perf_counter() - began)


def measure(kind: str, size: int, seconds: float) -> float:
    """One measurement of trajectories, or copies, per second."""
    if kind == "memcpy":
        return copies_per_second(size, seconds)
    with contextlib.ExitStack() as stack:
        address = "tcp://127.0.0.1:*" if kind == "tcp" else stack.enter_context(local_address(kind))
        return trajectories_per_second(address, make_codec(size), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one measurement")
    parser.add_argument("--repeats", type=int, default=5, help="measurements per row; the median is shown")
    arguments = parser.parse_args()
    table = Table("over", "size", "trajectories/s", "GB/s", "of memcpy")
    for label, size in SIZES.items():
        # Kinds take turns, so that a passing load does not fall on one of them alone.
        rates: dict[str, list[float]] = {kind: [] for kind in ("memcpy", "inproc", "ipc", "tcp")}
        for _ in range(arguments.repeats):
            for kind, measured in rates.items():
                measured.append(measure(kind, size, arguments.seconds))
        medians = {kind: statistics.median(measured) for kind, measured in rates.items()}
        for kind, rate in medians.items():
            share = rate / medians["memcpy"]
            table.add_row(kind, label, f"{rate:,.0f}", f"{rate * size / 1e9:.2f}", f"{share:.1%}")
        table.add_section()
    console = Console()
    console.print(table)
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    console.print(f"load average {load} on {os.cpu_count()} cores; median of {arguments.repeats}")


if __name__ == "__main__":
    main()
