"""Actors that come from elsewhere (`tianji actor`), go, and wait for their learner."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
import zmq

import tianji_jax
from short_runs import counting_config, free_ports
from tianji_jax import remote_actor
from tianji_jax.attendance import SILENCE_SECONDS
from tianji_jax.config import Config, ConfigError, to_yaml
from tianji_jax.transport import Codec, ParameterServer
from tianji_jax.types import ArraySpec
from tianji_jax.worker import WorkerError, Workers
from trainings import ENDLESS, Training, assert_learned_well, trainings


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Starts a training, which ends when the test does."""
    with trainings(tmp_path) as begin:
        yield begin


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts a command of tianji; whatever still runs when the test is over is killed."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "XLA_FLAGS": ""}
    with contextlib.ExitStack() as processes:

        def run(*arguments: str) -> "subprocess.Popen[str]":
            command = [sys.executable, "-m", "tianji_jax.cli", *arguments]
            log = (tmp_path / f"{arguments[0]}.log").open("a")
            processes.callback(log.close)
            process = subprocess.Popen(command, stdout=log, stderr=log, text=True, env=environment)
            processes.callback(process.wait)
            processes.callback(process.kill)
            return process

        yield run


def listening(tmp_path: Path, *overrides: dict[str, Any], count: int = 0) -> tuple[Path, str, Config]:
    """A configuration of a learner that listens, its file, and the address."""
    address = f"tcp://127.0.0.1:{free_ports()}"
    actors = {"actors": {"count": count, "environments": 4, "unroll_length": 5, "listen": address}}
    config = counting_config(tmp_path / "runs", ENDLESS, actors, *overrides)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(to_yaml(config))))
    return path, address, config


def until_file_says(path: Path, words: str, process: "subprocess.Popen[str]", seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while words not in (path.read_text() if path.exists() else ""):
        assert time.monotonic() < deadline, path.read_text()
        assert process.poll() is None, path.read_text()
        time.sleep(0.05)


def until_learning(folder: Path, process: "subprocess.Popen[str]", seconds: float = 60) -> None:
    """Wait for an update in the newest run of a folder."""
    deadline = time.monotonic() + seconds
    while True:
        files = sorted(folder.glob("*/metrics.jsonl"), key=lambda path: path.stat().st_ctime)
        if files and '"learner/loss"' in files[-1].read_text():
            return
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)


def test_actors_from_elsewhere_come_and_go(
    train: Callable[..., Training], start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    address = f"tcp://127.0.0.1:{free_ports()}"
    training = train(actors={"count": 1, "listen": address})
    training.until(lambda report: report["learner_steps"] > 0, 90)
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(training._config))
    actor = start("actor", str(path), "--connect", address, "--count", "2", "--id", "70000")
    training.until(lambda report: report["actors_connected"] == 3, 60)
    log = tmp_path / "actor.log"
    until_file_says(log, "steps/s", actor)
    assert "actor 70001: connected to " + address in log.read_text()
    actor.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert actor.wait(60) == 130
    assert time.monotonic() - began < 5
    report = training.until(lambda report: report["actors_connected"] == 1, 40)
    training.until(lambda later: later["learner_steps"] > report["learner_steps"] + 20, 20)
    training.finish()
    assert training.error is None
    assert_learned_well(training, 1, 1)


@pytest.mark.parametrize(
    "count", [pytest.param(1, id="one", marks=pytest.mark.slow), pytest.param(2, id="two, by a relay")]
)
def test_an_actor_waits_for_its_learner_before_and_between(
    start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path, count: int
) -> None:
    path, address, _ = listening(tmp_path)
    actor = start("actor", str(path), "--connect", address, "--count", str(count), "actors.parameters=bfloat16")
    log = tmp_path / "actor.log"
    until_file_says(log, "no learner at " + address, actor)
    for meeting in range(2):
        learner = start("train", str(path), "actors.parameters=bfloat16")
        until_learning(tmp_path / "runs", learner)
        until_file_says(log, "connected to " + address + (" again" if meeting else ""), actor)
        learner.kill()
        learner.wait()
        for run in (tmp_path / "runs").iterdir():
            run.rename(tmp_path / f"{run.name}-{meeting}")
    until_file_says(log, "no learner for", actor)
    actor.send_signal(signal.SIGINT)
    assert actor.wait(5) == 130
    assert "Traceback" not in log.read_text()


def test_an_actor_of_another_run_is_refused_with_the_reason(
    start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    path, address, _ = listening(tmp_path)
    start("train", str(path))
    actor = start("actor", str(path), "actors.unroll_length=7", "--connect", address)
    assert actor.wait(60) == 2
    said = (tmp_path / "actor.log").read_text()
    assert "actors.unroll_length: 7 where the learner has 5" in said
    assert "Traceback" not in said


def test_an_actor_that_fails_ends_with_its_traceback(
    start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    path, address, _ = listening(tmp_path, {"environment": {"options": {"fail_at_step": 3}}})
    start("train", str(path))
    actor = start("actor", str(path), "--connect", address)
    assert actor.wait(60) == 1
    assert "CountingEnv fails at step 3" in (tmp_path / "actor.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--connect", "tcp://here"], "--connect: got 'tcp://here'"),
        (["--connect", "tcp://127.0.0.1:5555", "--id", "3"], "--id: got 3; it should be from 65536"),
        (["--connect", "tcp://127.0.0.1:5555", "--count", "0"], "--count: got 0"),
        (["--connect", "tcp://10.0.0.1:5555"], "security.keys"),
        (["actors.count=1", "run.deterministic=true", "--connect", "tcp://127.0.0.1:5555"], "only the learner's own"),
    ],
)
def test_wrong_arguments_are_answered(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from tianji_jax.cli import main

    path, _, _ = listening(tmp_path)
    assert main(["actor", str(path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_learner_without_actors_needs_an_address(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"actors.count is 0.*actors.listen"):
        counting_config(tmp_path, {"actors": {"count": 0}})


def test_a_run_ends_when_nobody_acts_for_too_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seconds = SILENCE_SECONDS + 2
    _, address, config = listening(tmp_path)
    actors = config.actors.model_copy(update={"wait_seconds": seconds})
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"no actor has been heard of for .*actors.wait_seconds is 12"):
        tianji_jax.train(config.model_copy(update={"actors": actors}), show=False)
    assert seconds < time.monotonic() - began < seconds + 30
    assert "the run ends after 12 s of silence (actors.wait_seconds)" in caplog.text
    assert address in caplog.text


def test_what_a_dead_learner_promised_is_given_up_for_what_its_successor_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A credit may name a version that the resumed learner would reach only with the help of this actor."""
    monkeypatch.setattr(remote_actor, "LINE_SECONDS", 0.5)
    codec, context, stop = Codec({"w": ArraySpec((2,), np.dtype(np.float32))}, {}), zmq.Context(), threading.Event()
    workers = Workers()
    with (
        closing(ParameterServer("tcp://127.0.0.1:*", codec, context)) as server,
        closing(remote_actor._Trajectories("tcp://127.0.0.1:9", 70_000, codec, context, patient=True)) as stream,
        closing(remote_actor._Parameters(server.endpoint, codec, context)) as client,
    ):
        stream.tally, client.stream = remote_actor._Tally(), stream
        server.publish(80, {"w": np.zeros(2, np.float32)})
        workers.start("parameters", server.serve)
        received = client.newest(111, stop, 600.0)
        assert received is not None
        assert received[0] == 80
        assert workers.close(5) == []
    context.term()
