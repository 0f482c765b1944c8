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
from pathlib import Path

import jax
import zmq

from tianji_jax.blueprint import Addresses, connect, make_actor, plan
from tianji_jax.config import load
from tianji_jax.parallel import actor_device, learner_devices, use_compilation_cache
from tianji_jax.worker import POLL_SECONDS

END_SECONDS = 2.0
"""How long a child gets to end by itself before it is killed."""

TAIL_LINES = 40
"""Lines of a failed child's log that go into the error."""


class ActorProcessError(RuntimeError):
    """An actor process ended by itself; the message carries the end of its log, with its traceback."""


class ActorProcesses:
    """Starts a process for each actor and watches them."""

    def __init__(self, run_folder: Path, count: int, addresses: Addresses) -> None:
        """
        Args:
          run_folder: where `config.yaml` lies and `logs/` goes.
          count: actors.
          addresses: where the learner listens.
        """
        self._folder = run_folder
        self._count = count
        self._addresses = addresses

    def run(self, stop: threading.Event) -> None:
        """Start the processes, watch them until `stop` is set, end them."""
        (self._folder / "logs").mkdir(exist_ok=True)
        children: list[subprocess.Popen[bytes]] = []
        try:
            for actor_id in range(self._count):
                children.append(self._start(actor_id))
            while not stop.wait(POLL_SECONDS):
                for actor_id, child in enumerate(children):
                    if child.poll() is not None:
                        raise ActorProcessError(self._obituary(actor_id, child.returncode))
        finally:
            _end(children)

    def _start(self, actor_id: int) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "tianji_jax.actor_process", str(self._folder / "config.yaml")]
        command += ["--actor-id", str(actor_id), "--trajectories", self._addresses.trajectories]
        command += ["--parameters", self._addresses.parameters]
        # The interpreter puts this process's folder first on its path; a child started with -m would not see it.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with self._log(actor_id).open("wb") as log:
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
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        path = self._log(actor_id)
        tail = path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"actor process {actor_id} {how}; the end of {path}:", *tail])


def _end(children: "list[subprocess.Popen[bytes]]") -> None:
    for child in children:
        if child.stdin is not None:
            child.stdin.close()
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
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    stop = threading.Event()
    threading.Thread(target=_until_end_of_input, args=(stop,), name="parent watch", daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    _act(arguments.config, arguments.actor_id, Addresses(arguments.trajectories, arguments.parameters), stop)


def _until_end_of_input(stop: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    stop.set()
    time.sleep(2 * END_SECONDS)
    os._exit(1)


def _act(path: Path, actor_id: int, addresses: Addresses, stop: threading.Event) -> None:
    config = load(path)
    if config.actors.device == "cpu":
        # The accelerator is the learner's: a second process that merely looks at it takes memory there.
        jax.config.update("jax_platforms", "cpu")
        devices = []
    else:
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        devices = learner_devices(config.learner)
    use_compilation_cache(config.run.compilation_cache)
    blueprint = plan(config)
    actor = make_actor(blueprint, actor_id, actor_device(config.actors.device, devices, actor_id))
    context = zmq.Context()
    actor.run(*connect(blueprint, actor_id, addresses, context), stop)
    context.destroy(linger=0)


if __name__ == "__main__":
    main()
