"""SIGINT and SIGTERM, kept in mind even where Python swallows the exception that they raise."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells know it."""

PREEMPTED = 75
"""Exit code after SIGTERM, once the run is saved: `EX_TEMPFAIL` of sysexits.h, "try again later"."""

_SHOW_CURSOR = "\x1b[?25h"


class Preempted(SystemExit):
    """SIGTERM: a scheduler wants the machine back. Exits with `PREEMPTED` where nobody catches it."""

    def __init__(self, advice: str = "") -> None:
        super().__init__(PREEMPTED)
        self.advice = advice


class Interrupts:
    """Ctrl-C and SIGTERM for a program that may be importing, compiling, or waiting for its threads.

    Until there is a run, a signal raises its exception where the main thread happens to be, or ends the process at
    once. The exception may be lost in a callback of the garbage collector, so the signal is also kept for `check`. Once
    there is a run, a signal only sets the run's stop event: nothing is torn in the middle. A second Ctrl-C ends the
    process at once; a second SIGTERM does not, because some schedulers send several.
    """

    def __init__(self, at_once: bool = False) -> None:
        """
        Args:
          at_once: while there is no run, end the process without further ado. For a program of its own: an exception in
            the middle of the import of a library of C would come out as another one.
        """
        self._at_once = at_once
        self._received: signal.Signals | None = None
        self._stop: threading.Event | None = None

    def stop_by(self, stop: threading.Event) -> None:
        """From now on a signal sets `stop` and raises nothing; so does one that has come before."""
        self._stop = stop
        if self._received is not None:
            stop.set()

    @property
    def received(self) -> bool:
        """Whether there was a signal."""
        return self._received is not None

    def check(self, advice: str = "") -> None:
        """Raise if there was a signal: KeyboardInterrupt for Ctrl-C, `Preempted` for SIGTERM, with `advice`."""
        if self._received is not None:
            raise KeyboardInterrupt(advice) if self._received == signal.SIGINT else Preempted(advice)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """What `signal.signal` calls."""
        if self._received is not None:
            if number != signal.SIGINT:
                return
            _show_cursor()
            os._exit(128 + number)
        self._received = signal.Signals(number)
        if self._stop is None and self._at_once:
            _show_cursor()
            os.write(sys.stderr.fileno(), b"stopped\n")
            os._exit(INTERRUPTED if number == signal.SIGINT else PREEMPTED)
        if self._stop is None:
            self.check()
        else:
            self._stop.set()


def _show_cursor() -> None:
    """A panel hides it, and nothing of Python's runs any more that would bring it back."""
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), _SHOW_CURSOR.encode())


_active: Interrupts | None = None


@contextlib.contextmanager
def interrupts(at_once: bool = False) -> Iterator[Interrupts]:
    """Handle signals within the block; a block within gets the same object. Only the main thread is sent any.

    Args:
      at_once: see `Interrupts`.
    """
    global _active
    if _active is not None or threading.current_thread() is not threading.main_thread():
        yield _active or Interrupts()
        return
    _active = Interrupts(at_once)
    before = {number: signal.signal(number, _active.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield _active
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _active = None
