"""Named threads that stop, join, and hand their error to their owner."""

import threading
import time
from collections.abc import Callable

POLL_SECONDS = 0.1
"""Every blocking call in a worker waits at most this long before it looks at the stop event again."""


class WorkerError(RuntimeError):
    """A worker failed; the cause carries its traceback."""


class Workers:
    """The threads of one run. An error in any of them sets `stop` for all and reaches the owner through `check`.

    Attributes:
      stop: set when the run is to end; every worker's loop watches it.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._error: tuple[str, BaseException] | None = None
        self._lock = threading.Lock()

    def start(self, name: str, run: Callable[[threading.Event], None]) -> None:
        """Run `run(stop)` on a thread called `name` until it returns."""
        thread = threading.Thread(target=self._guard, args=(name, run), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def fail(self, name: str, error: BaseException) -> None:
        """Record the first error of the run and stop everybody."""
        with self._lock:
            if self._error is None:
                self._error = (name, error)
        self.stop.set()

    def check(self) -> None:
        """Raise `WorkerError` if a worker has failed, with that worker's exception as its cause."""
        if self._error is not None:
            name, error = self._error
            raise WorkerError(f"{name} failed: {type(error).__name__}: {error}") from error

    def close(self, timeout: float) -> list[str]:
        """Stop and join all threads; returns the names of those still running after `timeout` seconds."""
        self.stop.set()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _guard(self, name: str, run: Callable[[threading.Event], None]) -> None:
        try:
            run(self.stop)
        except BaseException as error:
            self.fail(name, error)
