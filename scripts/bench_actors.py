"""What a learner takes in from 1, 2, 4 ... actors whose environments sleep, and what stops it from taking more.

    python scripts/bench_actors.py [--most 64] [--seconds 10] [--bytes 1024 131072]

A real learner listens at a TCP port of this host; the actors are `tianji actor` processes of at most eight actors each.
Threads of the learner's process would contend for its lock of Python with the receiver that is measured; a process for
each actor would hold JAX 64 times. Environments sleep through their steps, so that an actor costs a few per cent of a
core and 64 of them do not need 64; the agent hardly looks at what it gets, so that the update costs little. Efficiency
is against actors that never wait.

The last row, `flood`, is the limit: clients that say what actors say and send without acting, as often as they may. On
one machine they take cores from the learner: `cores` tells what it uses, and what they use. Below, where its own went.
"""

import argparse
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import jax
import numpy as np
import psutil
import zmq
from gymnasium import spaces
from rich.console import Console
from rich.table import Table

import tianji_jax
from tianji_jax.blueprint import plan
from tianji_jax.config import to_yaml, validate
from tianji_jax.testing import TrivialAgent
from tianji_jax.transport import TrajectoryClient
from tianji_jax.types import ArraySpec, EnvSpec, PyTree, Stamp

UNROLL, STEP_SECONDS = 2, 0.1
PER_PROCESS = 8
FLOODS, UNDER_WAY = 2, 2
SEEN = 2
"""Values of an observation that the agent looks at."""


class Nap(gymnasium.Env):
    """Sleeps through its steps and never ends; observation uint8 `[size]`."""

    def __init__(self, size: int) -> None:
        self.observation_space = spaces.Box(0, 255, (size,), np.uint8)
        self.action_space = spaces.Discrete(2)
        self._observation = np.zeros(size, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return self._observation, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        time.sleep(STEP_SECONDS)
        return self._observation, 1.0, False, False, {}


class Idle(TrivialAgent):
    """Looks at the first values only."""

    def __init__(self, config: TrivialAgent.Config, env_spec: EnvSpec) -> None:
        super().__init__(config, env_spec)
        self._num_inputs = SEEN

    def _log_probs(self, params: PyTree, observation: PyTree, batch_dims: int) -> jax.Array:
        return super()._log_probs(params, observation[..., :SEEN], batch_dims)


class Spell(NamedTuple):
    """What was seen for some seconds.

    Attributes:
      rate: trajectories per second.
      report: the last one.
      threads: cores that each of this process's threads used.
      cores: used by this process, and by the actors.
    """

    rate: float
    report: dict[str, Any]
    threads: dict[str, float]
    cores: tuple[float, float]


class Bench:
    """A learner in this process, and what acts for it."""

    def __init__(self, folder: Path, size: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        tree = {
            "run": {"directory": str(folder), "name": "run", "environment_steps": 10**12},
            "environment": {"name": "bench_actors:Nap", "options": {"size": size}},
            "actors": {"count": 0, "environments": 1, "unroll_length": UNROLL, "listen": self.address},
            "learner": {"devices": 1, "platform": "cpu", "trajectories_per_update": 16},
            # Credits for 256 trajectories: more than the actors ever have under way.
            "staleness": {"max_lag": 15},
            "checkpoint": {"every_seconds": None},
            "agent": {"name": "bench_actors:Idle"},
        }
        tree["run"]["compilation_cache"] = str(folder / "compiled")
        tree["actors"]["double_buffered"] = False
        config = validate(tree)
        self.config, self._metrics = folder / "config.yaml", folder / "run" / "metrics.jsonl"
        self.config.write_text(to_yaml(config))
        self.processes: list[psutil.Popen] = []
        train = threading.Thread(target=tianji_jax.train, args=(config,), kwargs={"show": False}, daemon=True)
        train.start()
        self.until(lambda report: True)

    def act(self, *arguments: str) -> None:
        """Start a process."""
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
        with self.config.with_suffix(".log").open("a") as log:
            self.processes.append(psutil.Popen([sys.executable, *arguments], env=environment, stdout=log, stderr=log))

    def end(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()
        self.processes.clear()

    def measure(self, actors: int, seconds: float) -> Spell:
        """When so many are connected."""
        self.until(lambda report: report["actors_connected"] == actors)
        time.sleep(3)
        first, threads, theirs = self._last(), self._threads(), self._theirs()
        time.sleep(seconds)
        last = self._last()
        spent = last["wall_seconds"] - first["wall_seconds"]
        used = {name: (now - threads.get(name, 0.0)) / seconds for name, now in self._threads().items()}
        rate = (last["trajectories_received"] - first["trajectories_received"]) / spent
        return Spell(rate, last, used, (sum(used.values()), (self._theirs() - theirs) / seconds))

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Wait for a report of which this is true."""
        deadline = time.monotonic() + 180
        while not (self._metrics.exists() and (report := self._last()) and condition(report)):
            if time.monotonic() > deadline or any(process.poll() is not None for process in self.processes):
                log = self.config.with_suffix(".log")
                raise RuntimeError(log.read_text()[-2000:] if log.exists() else "the learner does not report")
            time.sleep(0.2)

    def _last(self) -> dict[str, Any]:
        lines = self._metrics.read_text().splitlines()
        return json.loads(lines[-1]) if lines else {}

    def _theirs(self) -> float:
        """CPU seconds of the actors so far."""
        return sum(sum(process.cpu_times()[:2]) for process in self.processes)

    def _threads(self) -> dict[str, float]:
        """CPU seconds of this process's threads so far, by name; those of libraries by what the kernel calls them."""
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        spent: dict[str, float] = {}
        for thread in psutil.Process().threads():
            with contextlib.suppress(OSError):
                name = names.get(thread.id) or Path(f"/proc/self/task/{thread.id}/comm").read_text().strip()
                spent[name] = spent.get(name, 0.0) + thread.user_time + thread.system_time
        return spent


def flood(path: str, address: str, first: int, count: int) -> None:
    """Say what actors say, and send the same trajectory for every credit, from `count` threads."""
    codec = plan(tianji_jax.load(path)).trajectory_codec()
    trajectory = jax.tree.map(
        lambda spec: np.zeros(spec.shape, spec.dtype), codec.spec, is_leaf=lambda node: isinstance(node, ArraySpec)
    )
    trajectory = trajectory._replace(valid=np.ones_like(trajectory.valid))
    context, stop = zmq.Context(), threading.Event()

    def send(actor_id: int) -> None:
        client = TrajectoryClient(address, actor_id, codec, context)
        client.hello(stop, 30)
        sequence = 0
        for _ in range(UNDER_WAY):
            client.request()
        while True:
            if (credit := client.credit(0.1)) is not None:
                client.send(Stamp(credit.version, actor_id, sequence), trajectory, [], {})
                client.request()
                sequence += 1

    threads = [threading.Thread(target=send, args=(first + i,)) for i in range(count)]
    for thread in threads:
        thread.start()


def spells(bench: Bench, most: int, seconds: float) -> Iterator[tuple[str, Spell]]:
    """Actors join those that are there; then they go, and the flood comes."""
    actors = 0
    while actors < most:
        target = min(max(1, 2 * actors), most)
        while actors < target:
            count = min(PER_PROCESS, target - actors)
            bench.act(
                "-m", "tianji_jax.cli", "actor", str(bench.config), "--connect", bench.address, "--count", str(count)
            )
            actors += count
        yield str(actors), bench.measure(actors, seconds)
    bench.end()
    bench.until(lambda report: report["actors_connected"] == 0)
    for number in range(FLOODS):
        first = str(2**20 + number * PER_PROCESS)
        bench.act(__file__, "--flood", str(bench.config), bench.address, first, str(PER_PROCESS))
    yield "flood", bench.measure(FLOODS * PER_PROCESS, seconds)


def show(size: int, most: int, seconds: float, console: Console) -> None:
    """Measure trajectories with observations of `size` bytes."""
    busy_shares = ("receiver", "batcher", "learner")
    table = Table("actors", "trajectories/s", "efficiency", "MB/s", *busy_shares, "cores", "limited by")
    table.title = f"{size:,} bytes an observation, {UNROLL + 1} in a trajectory; busy shares of threads"
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), size)
        try:
            for label, spell in spells(bench, most, seconds):
                report, ideal = spell.report, int(label) / (UNROLL * STEP_SECONDS) if label.isdigit() else None
                busy = [report.get(key, 0.0) for key in ("receiver_time/receiving", "batcher_time/assembly")]
                busy.append(1 - report.get("learner_time/waiting", 1.0))
                figures = [f"{spell.rate:,.0f}", f"{spell.rate / ideal:.0%}" if ideal else ""]
                figures += [f"{spell.rate * size * (UNROLL + 1) / 1e6:,.1f}", *(f"{share:.0%}" for share in busy)]
                figures += ["{:.2f} + {:.2f}".format(*spell.cores), report.get("limited_by", "") if ideal else ""]
                table.add_row(label, *figures)
        finally:
            bench.end()
        console.print(table)
        most_busy = sorted(spell.threads.items(), key=lambda item: -item[1])[:6]
        console.print("cores in the flood: " + ", ".join(f"{name} {used:.2f}" for name, used in most_busy))
        load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
        console.print(f"load average {load} on {os.cpu_count()} cores\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=64, help="actors in the last but one row")
    parser.add_argument("--seconds", type=float, default=10, help="length of one measurement")
    parser.add_argument(
        "--bytes", type=int, nargs="+", default=[1024, 131_072], help="of an observation; one table each"
    )
    parser.add_argument("--flood", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.flood:
        path, address, first, count = options.flood
        flood(path, address, int(first), int(count))
        return
    if len(options.bytes) > 1:  # a learner knows no end: each has a process of its own
        for size in map(str, options.bytes):
            kept = ["--most", str(options.most), "--seconds", str(options.seconds)]
            subprocess.run([sys.executable, __file__, *kept, "--bytes", size], check=True)
        return
    logging.getLogger("tianji_jax").setLevel(logging.ERROR)
    # Ended before its time it takes the actors with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    show(options.bytes[0], options.most, options.seconds, Console(width=120))
    os._exit(0)


if __name__ == "__main__":
    main()
