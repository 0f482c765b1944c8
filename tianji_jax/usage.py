"""How much of the machine's CPU a run uses."""

import contextlib
import time

import psutil

LOOK_SECONDS = 10.0
"""How often children are looked for, after as many seconds of looking each time: it means reading about every process
of the machine."""


class CpuUsage:
    """Measures between one call of `cores` and the next; for one thread. A child counts from when it is first seen."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self._began = self._then = self._looked = time.monotonic()
        self._seconds = {self._own: _seconds(self._own)}
        psutil.cpu_percent()

    def cores(self) -> tuple[float, float]:
        """Cores kept busy since the last call: by this process and its children, and by everybody on the machine."""
        now = time.monotonic()
        processes = list(self._seconds)
        if now - self._began < LOOK_SECONDS or now - self._looked >= LOOK_SECONDS:
            processes, self._looked = [self._own, *self._own.children(recursive=True)], now
        seconds = {}
        for process in processes:
            with contextlib.suppress(psutil.Error):  # it has just ended
                seconds[process] = _seconds(process)
        spent = sum(value - self._seconds.get(process, value) for process, value in seconds.items())
        used = spent / max(now - self._then, 1e-9)
        self._seconds, self._then = seconds, now
        return used, psutil.cpu_percent() / 100 * available_cores()


def _seconds(process: psutil.Process) -> float:
    """CPU seconds of a process, without its children's."""
    times = process.cpu_times()
    return float(times.user + times.system)


def available_cores() -> int:
    """Cores that this machine has."""
    return psutil.cpu_count() or 1
