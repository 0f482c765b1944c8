"""How much of the machine's CPU a run uses."""

import contextlib
import time

import psutil


class CpuUsage:
    """Measures between one call of `cores` and the next; for one thread."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._seconds = self._spent()
        self._then = time.monotonic()
        psutil.cpu_percent()

    def cores(self) -> tuple[float, float]:
        """Cores kept busy since the last call: by this process and its children, and by everybody on the machine."""
        now, seconds = time.monotonic(), self._spent()
        used = (seconds - self._seconds) / max(now - self._then, 1e-9)
        self._seconds, self._then = seconds, now
        return max(0.0, used), psutil.cpu_percent() / 100 * available_cores()

    def _spent(self) -> float:
        """CPU seconds of this process, of its children, and of those that have ended."""
        own = self._process.cpu_times()
        spent = own.user + own.system + own.children_user + own.children_system
        for child in self._process.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has just ended
                times = child.cpu_times()
                spent += times.user + times.system
        return spent


def available_cores() -> int:
    """Cores that this machine has."""
    return psutil.cpu_count() or 1
