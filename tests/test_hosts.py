"""Two hosts that are network namespaces of this machine, each with an address of its own (as root).

python -m pytest -m cluster tests/test_hosts.py
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from short_runs import counting_config
from tianji_jax.config import to_yaml
from tianji_jax.transport import make_keys

pytestmark = pytest.mark.cluster

HOSTS = {"tianji-a": "10.77.0.1", "tianji-b": "10.77.0.2"}
CACHE = Path(tempfile.gettempdir()) / f"tianji-tests-{os.getuid()}"
SILENCE_SECONDS = 5
ENDLESS = 10**9


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


def link(up: bool) -> None:
    """Plug in the cable between the hosts, or pull it out."""
    ip("-n", "tianji-b", "link", "set", "tianji-b", "up" if up else "down")


@pytest.fixture(scope="module", autouse=True)
def hosts() -> Iterator[None]:
    if os.geteuid() != 0 or subprocess.run(["ip", "netns", "add", "tianji-a"], capture_output=True).returncode:
        pytest.skip("needs root, and to be allowed to make network namespaces")
    folders = [Path("/etc/netns") / name for name in HOSTS]
    try:
        ip("netns", "add", "tianji-b")
        ip("link", "add", "tianji-a", "type", "veth", "peer", "name", "tianji-b")
        for (name, address), folder in zip(HOSTS.items(), folders, strict=True):
            ip("link", "set", name, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
            # The host's own name, as a real one would have it.
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        yield
    finally:
        for name, folder in zip(HOSTS, folders, strict=True):
            ip("netns", "del", name, check=False)
            with contextlib.suppress(OSError):
                (folder / "hosts").unlink()
                folder.rmdir()


class Command:
    """A command of tianji on one of the hosts."""

    def __init__(self, host: str, folder: Path, *arguments: str) -> None:
        self.output = folder / f"{host}-{time.monotonic_ns()}"
        command = ["ip", "netns", "exec", host, sys.executable, "-m", "tianji_jax.cli", *arguments]
        with self.output.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=folder)

    def text(self) -> str:
        return self.output.read_text()


@contextlib.contextmanager
def ended(*commands: Command) -> Iterator[None]:
    """End them, whatever happens."""
    link(up=True)
    try:
        yield
    finally:
        for command in commands:
            subprocess.run(["pkill", "-KILL", "-P", str(command.process.pid)])
            command.process.kill()
            command.process.wait()
        link(up=True)


def write(folder: Path, environment_steps: int, **actors: Any) -> None:
    config = counting_config(
        folder / "runs",
        {
            "run": {"environment_steps": environment_steps, "name": "r", "compilation_cache": str(CACHE)},
            "environment": {"options": {"step_seconds": 1e-3}},
            "learner": {"silence_seconds": SILENCE_SECONDS, "gather_seconds": 60, "platform": "cpu"},
            "actors": {"count": 1, "environments": 4, "unroll_length": 5, **actors},
            "security": {"keys": str(folder / "keys")},
            "checkpoint": {"every_learner_steps": 20},
        },
    )
    (folder / "c.yaml").write_text(to_yaml(config))
    if not (folder / "keys").exists():
        make_keys(folder / "keys")


def last(folder: Path) -> dict[str, Any]:
    path = folder / "runs" / "r" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1]) if lines else {"learner_steps": 0, "actors_connected": 0}


def until(folder: Path, condition: Any, *commands: Command) -> dict[str, Any]:
    deadline = time.monotonic() + 90
    while not condition(report := last(folder)):
        assert time.monotonic() < deadline, [report, *(command.text() for command in commands)]
        time.sleep(0.1)
    return report


def learners(folder: Path) -> list[Command]:
    place = ["--coordinator", f"{HOSTS['tianji-a']}:9000", "--process"]
    return [Command(host, folder, "learner", "c.yaml", *place, f"{rank}/2") for rank, host in enumerate(HOSTS)]


def test_two_hosts_train_together_with_keys(tmp_path: Path) -> None:
    write(tmp_path, 3000)
    both = learners(tmp_path)
    with ended(*both):
        codes = [command.process.wait(120) for command in both]
        assert codes == [0, 0], [command.text() for command in both]
    assert last(tmp_path)["environment_steps"] >= 3000


def test_a_learner_whose_link_is_cut_is_named_and_all_end(tmp_path: Path) -> None:
    write(tmp_path, ENDLESS)
    both = learners(tmp_path)
    with ended(*both):
        until(tmp_path, lambda report: report["learner_steps"] > 20, *both)
        link(up=False)
        began = time.monotonic()
        codes = [command.process.wait(SILENCE_SECONDS + 30) for command in both]
        assert time.monotonic() - began < SILENCE_SECONDS + 15
        assert 0 not in codes
        assert "tianji: learner 1 (" in both[0].text(), both[0].text()
        assert "has not been heard of for" in both[0].text()
        assert f"tianji: learner 0 at tcp://{HOSTS['tianji-a']}:9001 has not been heard of for" in both[1].text()


def test_actors_outlive_a_cut_link(tmp_path: Path) -> None:
    write(tmp_path, ENDLESS, listen=f"tcp://{HOSTS['tianji-a']}:5555")
    learner = Command("tianji-a", tmp_path, "train", "c.yaml")
    actor = Command("tianji-b", tmp_path, "actor", "c.yaml", "--connect", f"tcp://{HOSTS['tianji-a']}:5555")
    with ended(learner, actor):
        until(tmp_path, lambda report: report["actors_connected"] == 2 and report["learner_steps"] > 20, learner, actor)
        link(up=False)
        time.sleep(5)
        steps = last(tmp_path)["learner_steps"]
        link(up=True)
        # The learner's own actor goes on meanwhile; the other one is back soon after.
        until(tmp_path, lambda report: report["learner_steps"] > steps + 200, learner, actor)
        report = until(tmp_path, lambda report: report["actors_connected"] == 2, learner, actor)
        before = report["trajectories_consumed"]
        time.sleep(3)
        assert last(tmp_path)["trajectories_consumed"] > before
        assert learner.process.poll() is None
        assert actor.process.poll() is None
        counts = last(tmp_path)
        assert counts["trajectories_received"] == sum(
            counts[f"trajectories_{name}"] for name in ("consumed", "dropped", "rejected", "queued")
        )
