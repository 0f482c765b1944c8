"""`tianji learner` on two hosts that are processes here: who is lost is named, and nobody hangs."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from short_runs import counting_config, free_ports
from tianji_jax.config import to_yaml
from tianji_jax.transport import make_keys

CACHE = Path(tempfile.gettempdir()) / f"tianji-tests-{os.getuid()}"
SILENCE_SECONDS = 5
ENDLESS = 10**9


class Learner:
    """One `tianji learner` and what it prints."""

    def __init__(self, folder: Path, rank: int, size: int, port: int, *arguments: str) -> None:
        self.output = folder / f"output-{rank}-{time.monotonic_ns()}"
        command = [sys.executable, "-m", "tianji_jax.cli", "learner", str(folder / "c.yaml"), *arguments]
        command += ["--coordinator", f"127.0.0.1:{port}", "--process", f"{rank}/{size}"]
        with self.output.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def text(self) -> str:
        return self.output.read_text()

    def child(self) -> psutil.Process:
        """The training process."""
        (child,) = (
            c for c in psutil.Process(self.process.pid).children() if "learner_process" in " ".join(c.cmdline())
        )
        return child

    def end(self, seconds: float = 60) -> str:
        """Wait for its end; what it said last."""
        self.process.wait(seconds)
        said = [line for line in self.text().splitlines() if line.startswith(("tianji: ", "stopped", "no episode"))]
        return said[-1] if said else self.text()


@contextlib.contextmanager
def learners(folder: Path, *arguments: str, environment_steps: int = ENDLESS) -> Iterator[list[Learner]]:
    """Two of them, which train."""
    write(folder, environment_steps)
    port = free_ports()
    started = [Learner(folder, rank, 2, port, *arguments) for rank in range(2)]
    try:
        yield started
    finally:
        for learner in started:
            with contextlib.suppress(psutil.Error):
                for process in psutil.Process(learner.process.pid).children(recursive=True):
                    process.kill()
            learner.process.kill()
            learner.process.wait()


def write(folder: Path, environment_steps: int) -> None:
    config = counting_config(
        folder,
        {
            "run": {"environment_steps": environment_steps, "name": "r", "compilation_cache": str(CACHE)},
            "environment": {"options": {"episode_length": 5, "step_seconds": 1e-3}},
            "learner": {"silence_seconds": SILENCE_SECONDS, "gather_seconds": 30, "platform": "cpu"},
            "checkpoint": {"every_learner_steps": 20},
        },
    )
    (folder / "c.yaml").write_text(to_yaml(config))


def reports(folder: Path) -> list[dict]:
    path = folder / "r" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def until_trained(folder: Path, learner_steps: int = 30) -> None:
    deadline = time.monotonic() + 60
    while not reports(folder) or reports(folder)[-1]["learner_steps"] < learner_steps:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_both_train_and_end_in_good_order(tmp_path: Path) -> None:
    with learners(tmp_path, environment_steps=3000) as both:
        assert [learner.process.wait(90) for learner in both] == [0, 0], [learner.text() for learner in both]
    assert reports(tmp_path)[-1]["environment_steps"] >= 3000
    # The other one's are in it.
    assert (tmp_path / "r" / "learner-1" / "config.yaml").exists()
    assert not (tmp_path / "r" / "learner-1" / "metrics.jsonl").exists()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_learner_is_named_and_all_end_and_go_on(tmp_path: Path, rank: int) -> None:
    with learners(tmp_path) as both:
        until_trained(tmp_path)
        killed = both[rank]
        keeper = killed.process.pid
        killed.child().kill()
        began = time.monotonic()
        for learner in both:
            said = learner.end(SILENCE_SECONDS + 20)
            assert learner.process.returncode != 0
            assert re.match(rf"tianji: learner {rank} \(.*process {keeper}\) was ended by SIGKILL; ", said), (
                learner.text()
            )
        assert time.monotonic() - began < SILENCE_SECONDS + 10
    if rank == 0:
        return  # going on is the same
    before = reports(tmp_path)[-1]["learner_steps"]
    write(tmp_path, ENDLESS)
    port = free_ports()
    # Learner 1's host does not have the run's folder.
    runs = [tmp_path / "r", tmp_path / "elsewhere" / "r"]
    resumed = [Learner(tmp_path, r, 2, port, "--resume", str(run)) for r, run in enumerate(runs)]
    try:
        until_trained(tmp_path, before + 20)
        resumed[1].process.send_signal(signal.SIGTERM)
        assert [learner.process.wait(60) for learner in resumed] == [75, 75], [learner.text() for learner in resumed]
    finally:
        for learner in resumed:
            learner.process.kill()


def test_a_learner_that_hangs_is_named(tmp_path: Path) -> None:
    with learners(tmp_path) as both:
        until_trained(tmp_path)
        both[1].child().suspend()
        for learner in both:
            said = learner.end(SILENCE_SECONDS + 20)
            assert re.match(r"tianji: learner 1 \(.*\) hangs: no sign of life for \d+ s", said), learner.text()
            assert learner.process.returncode != 0


@pytest.mark.slow
def test_a_host_that_is_gone_is_named(tmp_path: Path) -> None:
    """Keeper and training both: nobody there is left to say anything."""
    with learners(tmp_path) as both:
        until_trained(tmp_path)
        child = both[1].child()
        both[1].process.kill()
        child.kill()
        said = both[0].end(SILENCE_SECONDS + 20)
        assert re.match(r"tianji: learner 1 \(.*\) has not been heard of for \d+ s", said), both[0].text()


@pytest.mark.slow
def test_a_keeper_that_is_killed_takes_its_training_with_it(tmp_path: Path) -> None:
    with learners(tmp_path) as both:
        until_trained(tmp_path)
        child = both[0].child()
        both[0].process.kill()
        child.wait(15)
        said = both[1].end(SILENCE_SECONDS + 20)
        assert re.match(r"tianji: learner 0 at tcp://\S+ has not been heard of for \d+ s", said), both[1].text()


def test_ctrl_c_on_one_stops_both_after_the_same_update(tmp_path: Path) -> None:
    with learners(tmp_path) as both:
        until_trained(tmp_path)
        both[1].process.send_signal(signal.SIGINT)
        assert both[1].process.wait(60) == 130, both[1].text()
        assert both[0].process.wait(60) == 75, both[0].text()
    assert f"another learner was stopped; go on with: tianji learner --resume {tmp_path / 'r'}" in both[0].text()
    assert f"stopped; go on with: tianji learner --resume {tmp_path / 'r'}\n" in both[1].text()
    saved = max(int(path.name) for path in (tmp_path / "r" / "checkpoints").iterdir())
    assert saved == reports(tmp_path)[-1]["learner_steps"]


def test_a_learner_that_does_not_come_is_named(tmp_path: Path) -> None:
    write(tmp_path, ENDLESS)
    first = Learner(tmp_path, 0, 3, free_ports(), "learner.gather_seconds=3")
    said = first.end()
    assert re.match(
        r"tianji: learner 1, 2 of 3 has not come within 3 s \(learner.gather_seconds\); there are 0 \(", said
    )
    port = free_ports()
    second = Learner(tmp_path, 1, 2, port, "learner.gather_seconds=3")
    address = re.escape(f"tcp://127.0.0.1:{port + 1}")
    assert re.match(rf"tianji: learner 0 at {address} has not been heard of for \d+ s \(learner.gather", second.end())


def test_learners_that_disagree_on_their_number_or_rank_are_refused(tmp_path: Path) -> None:
    write(tmp_path, ENDLESS)
    port = free_ports()
    pair = [Learner(tmp_path, 0, 2, port), Learner(tmp_path, 1, 4, port)]
    for learner in pair:
        assert re.match(r"tianji: .* was started as learner 1 of 4, learner 0 as one of 2", learner.end()), (
            learner.text()
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--process", "2/2", "--coordinator", "localhost:9000"], "--process 2/2: RANK/SIZE is expected"),
        (["--process", "0/2", "--coordinator", "localhost"], "--coordinator localhost: HOST:PORT is expected"),
        (["--process", "0/2", "--coordinator", "example.com:9000"], "is beyond this host, which needs keys"),
        ([], "which learner is this?"),
    ],
)
def test_a_place_that_cannot_be_is_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    write(tmp_path, ENDLESS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMPI"))}
    command = [sys.executable, "-m", "tianji_jax.cli", "learner", str(tmp_path / "c.yaml"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_with_keys_a_learner_with_others_does_not_get_in(tmp_path: Path) -> None:
    ours, others = tmp_path / "ours", tmp_path / "others"
    make_keys(ours)
    make_keys(others)
    write(tmp_path, ENDLESS)
    port, gather = free_ports(), "learner.gather_seconds=5"
    leader = Learner(tmp_path, 0, 2, port, gather, f"security.keys={ours}")
    stranger = Learner(tmp_path, 1, 2, port, gather, f"security.keys={others}")
    assert "learner 1 of 2 has not come" in leader.end()
    assert "has not been heard of" in stranger.end()
