"""Actors as processes of their own on the learner's host.

The learner starts `python -m tianji_jax.actor_process`; nothing is forked.
A child ends when its standard input ends, which happens when the learner lets go of it or dies, however it dies.
"""

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import zmq

from tianji_jax.attendance import Attendance
from tianji_jax.blueprint import Addresses, Blueprint, connect, make_actor, plan
from tianji_jax.config import Config, load
from tianji_jax.parallel import actor_device, learner_devices, use_compilation_cache
from tianji_jax.startup import collect_garbage_seldom
from tianji_jax.worker import POLL_SECONDS
from tianji_jax.world import World

logger = logging.getLogger(__name__)

END_SECONDS = 2.0
"""How long a child gets to end by itself before it is killed."""

TAIL_LINES = 40
"""Lines of a failed child's log that go into the error."""


FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
"""Seconds before a killed actor is started again; they double from one to the other."""

HEALTHY_SECONDS = 60.0
"""An actor that has lived for so long starts with a clean sheet when it is killed."""


class ActorProcessError(RuntimeError):
    """An actor process ended by itself; the message carries the end of its log, with its traceback."""


@dataclass
class _Child:
    """One of the actors that the learner started.

    Attributes:
      process: it runs in.
      started: when, by the monotonic clock.
      start_at: when it is to be started again; None while it runs.
      restarts: since it last lived for `HEALTHY_SECONDS`.
      lives: that it has had before this one.
    """

    process: "subprocess.Popen[bytes]"
    started: float
    start_at: float | None = None
    restarts: int = 0
    lives: int = 0


class ActorProcesses:
    """Starts a process for each actor, watches them, and starts those again that are killed."""

    def __init__(
        self,
        run_folder: Path,
        blueprint: Blueprint,
        addresses: Addresses,
        attendance: Attendance,
        version: Callable[[], int],
    ) -> None:
        """
        Args:
          run_folder: where `config.yaml` lies and `logs/` goes.
          blueprint: of the run.
          addresses: where the learner listens.
          attendance: is told of processes that ended and of those started again.
          version: the learner's policy version.
        """
        config = blueprint.config
        self._folder = run_folder
        self._world = blueprint.world
        self._count = config.actors.count
        self._max_restarts = 0 if config.run.deterministic else config.actors.max_restarts
        self._deterministic = config.run.deterministic
        self._addresses = addresses
        self._attendance = attendance
        self._version = version

    def run(self, stop: threading.Event) -> None:
        """Start the processes, watch them until `stop` is set, end them.

        Raises:
          ActorProcessError: one ended by an exception of its own, or was killed once too often.
        """
        (self._folder / "logs").mkdir(exist_ok=True)
        children: list[_Child] = []
        try:
            for actor_id in range(self._count):
                children.append(_Child(self._start(actor_id, 0), time.monotonic()))
            while not stop.wait(POLL_SECONDS):
                for actor_id, child in enumerate(children):
                    self._look_after(actor_id, child)
        finally:
            _end([child.process for child in children])

    def _look_after(self, actor_id: int, child: _Child) -> None:
        now = time.monotonic()
        if child.start_at is not None:
            if now >= child.start_at:
                child.start_at, child.started = None, now
                child.lives += 1
                child.process = self._start(actor_id, child.lives)
                self._attendance.restarted()
        elif (code := child.process.poll()) is not None:
            self._attendance.departed(actor_id)
            _let_go(child.process)
            if now - child.started >= HEALTHY_SECONDS:
                child.restarts = 0
            # SIGTERM ends an actor in good order, with 0. What ends by an exception is a bug and would do so again.
            if code > 0 or child.restarts >= self._max_restarts:
                raise ActorProcessError(self._obituary(actor_id, code))
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**child.restarts)
            child.restarts += 1
            child.start_at = now + pause
            logger.warning(
                "actor process %d %s; it is started again in %g s (%d of at most %d times, actors.max_restarts)",
                actor_id,
                _how(code),
                pause,
                child.restarts,
                self._max_restarts,
            )

    def _start(self, actor_id: int, lives: int) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "tianji_jax.actor_process", str(self._folder / "config.yaml")]
        command += ["--actor-id", str(actor_id), "--trajectories", self._addresses.trajectories]
        # The version alone could be the same as that of the life before.
        command += ["--parameters", self._addresses.parameters, "--start", str(self._version() + lives)]
        command += ["--learner", str(self._world.rank), "--learners", str(self._world.size)]
        # The interpreter puts this process's folder first on its path; a child started with -m would not see it.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with self._log(actor_id).open("ab" if lives else "wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                # Ctrl-C in the terminal is for the learner, which then ends its actors.
                start_new_session=True,
            )

    def _log(self, actor_id: int) -> Path:
        return self._folder / "logs" / f"actor-{actor_id}.log"

    def _obituary(self, actor_id: int, code: int) -> str:
        why = ""
        if code <= 0 and self._deterministic:
            why = ", and run.deterministic cannot go on without what it had to send"
        elif code <= 0:
            why = f", and actors.max_restarts is {self._max_restarts}"
        path = self._log(actor_id)
        tail = path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"actor process {actor_id} {_how(code)}{why}; the end of {path}:", *tail])


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _let_go(process: "subprocess.Popen[bytes]") -> None:
    """End a child's standard input, at which it ends."""
    assert process.stdin is not None
    process.stdin.close()


def _end(children: "list[subprocess.Popen[bytes]]") -> None:
    for child in children:
        _let_go(child)
    deadline = time.monotonic() + END_SECONDS
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def main() -> None:
    """Entry point of the child."""
    parser = argparse.ArgumentParser(description="one actor of a run; started by the learner")
    parser.add_argument("config", type=Path)
    parser.add_argument("--actor-id", type=int, required=True)
    parser.add_argument("--trajectories", required=True)
    parser.add_argument("--parameters", required=True)
    parser.add_argument("--start", type=int, required=True, help="see Role.start")
    parser.add_argument("--learner", type=int, default=0, help="see World.rank")
    parser.add_argument("--learners", type=int, default=1, help="see World.size")
    arguments = parser.parse_args()
    collect_garbage_seldom()
    logging.basicConfig(level=logging.INFO)
    stop = threading.Event()
    threading.Thread(target=_until_end_of_input, args=(stop,), name="parent watch", daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    config, addresses = load(arguments.config), Addresses(arguments.trajectories, arguments.parameters)
    devices = acting_devices(config)
    blueprint = plan(config, World(arguments.learner, arguments.learners))
    device = actor_device(config.actors.device, devices, arguments.actor_id)
    actor = make_actor(blueprint, arguments.actor_id, device, arguments.start)
    context = zmq.Context()
    actor.run(*connect(blueprint, arguments.actor_id, addresses, context), stop)
    context.destroy(linger=0)


def _until_end_of_input(stop: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    stop.set()
    time.sleep(2 * END_SECONDS)
    os._exit(1)


def acting_devices(config: Config) -> list[jax.Device]:
    """Set JAX up for a process that only acts; the accelerators that its actors may use."""
    devices = []
    if config.actors.device == "cpu":
        # The accelerator is the learner's: a second process that merely looks at it takes memory there.
        jax.config.update("jax_platforms", "cpu")
    else:
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        devices = learner_devices(config.learner)
    use_compilation_cache(config.run.compilation_cache)
    return devices


if __name__ == "__main__":
    main()
