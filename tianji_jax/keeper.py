"""Keeps a learner that is one of several: waits until all are there, watches, and ends it when one is lost.

`tianji learner` is a keeper; the training is a child of its own. JAX's collectives wait for ever for a peer that hangs,
and JAX aborts a process whose coordinator is gone; a process without JAX beside it can still say who is missing, where,
and end in good order.

Keepers talk to that of learner 0, at the port after the coordinator's, once a second.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

import zmq

from tianji_jax.config import Config, ConfigError
from tianji_jax.roll import IN_ORDER, Place
from tianji_jax.transport import (
    KeyFileError,
    Meeting,
    Patience,
    ServerKeys,
    Standing,
    is_loopback,
    load_server_keys,
    open_meeting,
)

START_SECONDS = 120.0
"""Until the training process gives its first sign of life: it has to load JAX first."""

FAILED = 1


def find_place(coordinator: str | None, process: str | None) -> Place:
    """Which learner this is: as the command line says, or else as JAX finds out from Slurm, a TPU pod or Kubernetes.

    Args:
      coordinator: `HOST:PORT`.
      process: `RANK/SIZE`.

    Raises:
      ConfigError: neither says so, or not in these forms.
    """
    address, rank, size = coordinator, None, None
    if process is not None:
        match = re.fullmatch(r"(\d+)/(\d+)", process)
        if match is None or not int(match[1]) < int(match[2]):
            raise ConfigError(f"--process {process}: RANK/SIZE is expected, such as 0/2 and 1/2 for two learners")
        rank, size = int(match[1]), int(match[2])
    if address is None or rank is None:
        from jax._src.clusters import ClusterEnv

        try:
            address, size, rank, _ = ClusterEnv.auto_detect_unset_distributed_params(
                address, size, rank, None, None, 60
            )
        except Exception as error:
            raise ConfigError(f"what JAX found out about this cluster cannot be used: {error}") from error
    if address is None or rank is None or size is None:
        raise ConfigError(
            "which learner is this? No cluster that JAX knows (Slurm, TPU pod, Kubernetes, MPI) was found: give "
            "--coordinator HOST:PORT and --process RANK/SIZE"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65535:
        raise ConfigError(f"--coordinator {address}: HOST:PORT is expected, with a port from 1 to 65534")
    return Place(host, int(port), rank, size)


class Child:
    """The training process: `python -m tianji_jax.learner_process`. It ends when its standard input does."""

    def __init__(self, place: Place, arguments: list[str]) -> None:
        """
        Args:
          place: of this learner.
          arguments: of `tianji train`.
        """
        self._beats, writes = os.pipe()
        os.set_blocking(self._beats, False)
        command = [sys.executable, "-m", "tianji_jax.learner_process", f"{place.host}:{place.port}"]
        command += [str(place.rank), str(place.size), str(writes), *arguments]
        # Ctrl-C in the terminal is for the keeper, which passes it on.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[writes], start_new_session=True)
        os.close(writes)
        self._heard = time.monotonic() + START_SECONDS

    def silent(self) -> float:
        """Seconds since it last gave a sign of life."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._beats, 4096):
                self._heard = time.monotonic()
        return max(0.0, time.monotonic() - self._heard)

    def kill(self) -> None:
        """End it now, wherever it hangs."""
        self.process.kill()
        self.process.wait()


@dataclass
class Keeper:
    """One learner's keeper.

    Attributes:
      place: of the learner.
      config: of the run.
      start: starts the training process.
    """

    place: Place
    config: Config
    start: Callable[[], Child]

    def run(self) -> int:
        """Keep the learner until its end; returns the exit code.

        Raises:
          ConfigError: the place to meet is taken, or needs keys.
        """
        learner, keys = self.config.learner, _keys(self.config, self.place.meeting)
        patience = Patience(learner.gather_seconds, learner.silence_seconds)
        self._child: Child | None = None
        self._passed_on = 0
        with contextlib.ExitStack() as undo:
            self._signals = undo.enter_context(_noted_signals())
            try:
                others = undo.enter_context(open_meeting(self.place, patience, keys))
            except zmq.ZMQError as error:
                raise ConfigError(
                    f"--coordinator: cannot listen at {self.place.meeting} (the keepers' port is the one after the "
                    f"coordinator's): {error.strerror}"
                ) from None
            undo.callback(self._end_child)
            return self._watch(others)

    def _watch(self, others: Meeting) -> int:
        name = f"{socket.gethostname()}, process {os.getpid()}"
        while True:
            child = self._child
            silent, code = (0.0, None) if child is None else (child.silent(), child.process.poll())
            others.turn(Standing(name, silent, code))
            if others.why is not None:
                print(f"tianji: {others.why}; all learners end, go on with --resume", file=sys.stderr)
                return code if code is not None and code > 0 else FAILED
            if code in IN_ORDER and others.over:
                return code
            if child is not None:
                self._pass_on_signals(child)
            elif self._signals:
                return 128 + self._signals[0]
            elif others.complete:
                self._child = self.start()

    def _pass_on_signals(self, child: Child) -> None:
        for number in self._signals[self._passed_on :]:
            self._passed_on += 1
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGKILL if self._passed_on > 1 and number == signal.SIGINT else number)

    def _end_child(self) -> None:
        if self._child is not None and self._child.process.poll() is None:
            self._child.kill()


def _keys(config: Config, address: str) -> ServerKeys | None:
    security = config.security
    if security.keys is not None:
        try:
            return load_server_keys(security.keys.expanduser())
        except KeyFileError as error:
            raise ConfigError(f"security.keys: {error}") from None
    if not (security.allow_plaintext or is_loopback(address)):
        raise ConfigError(
            f"--coordinator: {address} is beyond this host, which needs keys: make them with `tianji keys new DIR`, "
            "copy DIR to every learner's host and set security.keys=DIR. In a network where everybody may take part, "
            "security.allow_plaintext=true does without"
        )
    return None


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Signals that come are noted, oldest first."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
