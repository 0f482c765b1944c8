"""What a run says of the CPU that it uses."""

import subprocess
import sys
import time

import pytest

from tianji_jax import usage
from tianji_jax.usage import CpuUsage


def test_a_child_counts_while_it_works_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "LOOK_SECONDS", 0.0)
    cpu = CpuUsage()
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.3)
        cpu.cores()  # sees it
        time.sleep(1.0)
        used, busy = cpu.cores()
        # Half a core: others may be at work here. All figures come in steps of 10 ms.
        assert 0.3 < used < 1.2
        assert busy > 0.3
    finally:
        child.kill()
        child.wait()
    time.sleep(0.3)
    # What it had used does not come back as use of this moment.
    assert cpu.cores()[0] < 0.5
    assert cpu.cores()[0] >= 0.0


def test_children_are_not_looked_for_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "LOOK_SECONDS", 60.0)
    now = [1000.0]
    looked = []
    monkeypatch.setattr(usage.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(usage.psutil.Process, "children", lambda self, recursive: looked.append(now[0]) or [])
    cpu = CpuUsage()
    for now[0] in (1001.0, 1030.0, 1061.0, 1080.0, 1089.0, 1090.0, 1149.0, 1150.0):
        cpu.cores()
    assert looked == [1001.0, 1030.0, 1090.0, 1150.0]
