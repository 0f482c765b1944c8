"""Actor processes that are killed, stopped, let go on, and come from elsewhere, while training runs."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import pytest
import yaml

import tianji_jax
from short_runs import counting_config
from test_train import assert_account_balances
from tianji_jax.agent import Metrics
from tianji_jax.attendance import SILENCE_SECONDS
from tianji_jax.config import Config, ConfigError, to_yaml
from tianji_jax.testing import CountingEnv, TrivialAgent
from tianji_jax.types import Batch
from tianji_jax.worker import WorkerError

T, B = 5, 2
NUMBERS = 2**23
FINISHING = 2.0**30
FINISHED = 1e9
"""A return above all that is possible before the end is wanted, below those after."""


class UniqueEnv(CountingEnv):
    """Rewards are random numbers, by which trajectories are known; tells in files what it does.

    In `directory` there is a file for each environment of each life of an actor, named after its process and its seed,
    with a byte for each step and each reset after the first. Once there is a file `finish`, rewards are so high that
    the run ends.
    """

    def __init__(self, directory: str, **options: Any) -> None:
        super().__init__(**options)
        self._directory = Path(directory)
        self._random = np.random.default_rng()
        self._file = -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self._file < 0:
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
            self._file = os.open(self._directory / f"{os.getpid()}-{seed}", flags)
        else:
            os.write(self._file, b".")
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> Any:
        observation, _, *end = super().step(action)
        os.write(self._file, b".")
        number = float(self._random.integers(NUMBERS))
        reward = FINISHING + 128 * number if (self._directory / "finish").exists() else number
        return observation, reward, *end


LEARNED: list[tuple[np.ndarray, np.ndarray]] = []
"""Rewards `[T, b]` and lags `[b]` of each batch that the agent was given."""


class Recorder(TrivialAgent):
    """Keeps what it learns from."""

    def update(self, train_state: Any, batch: Batch, rng: jax.Array, axis_name: str) -> tuple[Any, Metrics]:
        jax.debug.callback(lambda *record: LEARNED.append(record), batch.trajectory.reward, batch.lag)
        # The rewards are large; what is learned from them is of no interest.
        tame = batch._replace(trajectory=batch.trajectory._replace(reward=batch.trajectory.valid * 1.0))
        return super().update(train_state, tame, rng, axis_name)


class Training:
    """A run in this process, on a thread; its actors are processes."""

    def __init__(self, config: Config) -> None:
        self.folder = Path(config.run.directory)
        self._config = config
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._train)
        LEARNED.clear()
        self._thread.start()

    def _train(self) -> None:
        try:
            tianji_jax.train(self._config, show=False)
        except BaseException as error:
            self.error = error

    def reports(self) -> list[dict[str, Any]]:
        files = list(self.folder.glob("*/metrics.jsonl"))
        lines = files[0].read_text().splitlines(keepends=True) if files else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def until(self, condition: Callable[[dict[str, Any]], bool], seconds: float) -> dict[str, Any]:
        """Wait for a report that meets the condition."""
        deadline, reports = time.monotonic() + seconds, []
        while time.monotonic() < deadline and self._thread.is_alive():
            reports = self.reports()
            if reports and condition(reports[-1]):
                return reports[-1]
            time.sleep(0.05)
        pytest.fail(f"not within {seconds} s; {self.error!r}; {reports[-1:]}")

    def rate(self, seconds: float) -> float:
        """Environment steps a second, measured for so long."""
        before = self.reports()[-1]
        time.sleep(seconds)
        after = self.reports()[-1]
        elapsed = after["wall_seconds"] - before["wall_seconds"]
        return (after["environment_steps"] - before["environment_steps"]) / elapsed

    def finish(self) -> None:
        (self.folder / "finish").touch()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def end(self) -> None:
        if self._thread.is_alive():
            self.finish()


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Starts a training and ends it when the test is over."""
    with contextlib.ExitStack() as trainings:

        def begin(**overrides: dict[str, Any]) -> Training:
            training = Training(recorded(tmp_path, **overrides))
            trainings.callback(training.end)
            return training

        yield begin


def recorded(tmp_path: Path, **overrides: dict[str, Any]) -> Config:
    options = {"directory": str(tmp_path), "episode_length": T, "step_seconds": 2e-3}
    sections: dict[str, dict[str, Any]] = {
        "run": {"environment_steps": 10**9, "stop_at_return": FINISHED, "report_every_seconds": 0.1},
        "environment": {"name": f"{__name__}:UniqueEnv", "options": options},
        "actors": {"environments": B, "unroll_length": T, "placement": "process"},
        "agent": {"name": f"{__name__}:Recorder"},
    }
    return counting_config(tmp_path, sections, overrides)


def actor_processes() -> list[psutil.Process]:
    """Those of this process, in the order of their ids."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            command = child.cmdline()
            if "tianji_jax.actor_process" in command:
                found.append((int(command[command.index("--actor-id") + 1]), child))
    return [child for _, child in sorted(found, key=lambda pair: pair[0])]


def assert_learned_well(training: Training, trajectories: int, max_lag: int) -> None:
    """No trajectory was used twice, none that is too old, and all that were used were counted."""
    names = [
        np.asarray(reward)[:, first : first + B].tobytes()
        for reward, _ in LEARNED
        for first in range(0, trajectories * B, B)
    ]
    assert len(set(names)) == len(names) > 0
    assert all(0 <= lag.min() <= lag.max() <= max_lag for _, lag in LEARNED)
    reports = training.reports()
    assert_account_balances(reports)
    assert reports[-1]["trajectories_consumed"] == len(names)


def lives(folder: Path) -> dict[int, list[tuple[int, int]]]:
    """By process: the seed of each of its environments, and the steps it took."""
    found: dict[int, list[tuple[int, int]]] = {}
    for path in folder.iterdir():
        process, _, seed = path.name.partition("-")
        if process.isdigit():
            found.setdefault(int(process), []).append((int(seed), path.stat().st_size))
    return found


def kill_for(training: Training, seconds: float) -> int:
    """Kill a random actor every second; how many were."""
    random.seed(0)
    killed = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(1)
        if processes := actor_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                random.choice(processes).kill()
                killed += 1
    return killed


@pytest.mark.parametrize("seconds", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_actors_may_be_killed_every_second(train: Callable[..., Training], seconds: int, tmp_path: Path) -> None:
    actors, trajectories, max_lag = 4, 2, 1
    training = train(
        actors={"count": actors},
        staleness={"max_lag": max_lag},
        learner={"devices": 1, "trajectories_per_update": trajectories},
    )
    training.until(lambda report: report["actors_connected"] == actors and report["learner_steps"] > 20, 90)
    usual = training.rate(3)
    killed = kill_for(training, seconds)
    assert killed > seconds / 2
    training.until(lambda report: report["actors_connected"] == actors and not report["actors_hung"], 60)
    assert len(actor_processes()) == actors
    deadline = time.monotonic() + 30
    while training.rate(3) < usual / 2:
        assert time.monotonic() < deadline
    training.finish()
    assert training.error is None
    assert_learned_well(training, trajectories, max_lag)
    last = training.reports()[-1]
    # One that had not begun to act when it was killed was never known.
    known = lives(tmp_path)
    assert actors < len(known) <= actors + last["actors_restarted"]
    assert killed / 2 < last["actors_restarted"] <= killed
    # What the environments have seen: no life repeats another, and every trajectory they made arrived or was counted as
    # lost, but for those that were on their way at the end.
    seeds = [seed for environments in known.values() for seed, _ in environments]
    assert len(set(seeds)) == len(seeds)
    made = sum(min(steps for _, steps in environments) // T for environments in known.values())
    on_their_way = 2 * actors
    assert last["trajectories_received"] <= made + last["trajectories_rejected"]
    assert made <= last["trajectories_received"] + last["trajectories_lost"] + on_their_way
    assert last["trajectories_lost"] <= 2 * killed


def test_a_stopped_actor_is_noticed_and_the_others_go_on(train: Callable[..., Training]) -> None:
    """Strictly on-policy, and a batch takes all that may be granted: while one holds a credit there is no update."""
    actors = 3
    training = train(
        actors={"count": actors},
        staleness={"max_lag": 0},
        learner={"devices": 1, "trajectories_per_update": actors},
    )
    training.until(lambda report: report["actors_connected"] == actors and report["learner_steps"] > 20, 90)
    victim = actor_processes()[1]
    victim.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    before = training.until(lambda report: report["actors_hung"] == 1, 20)
    noticed = time.monotonic() - stopped
    after = training.until(lambda report: report["learner_steps"] > before["learner_steps"] + 20, 10)
    assert noticed < 15
    assert after["environment_steps"] > before["environment_steps"]
    dropped = training.reports()[-1]["trajectories_dropped"]
    victim.send_signal(signal.SIGCONT)
    back = training.until(lambda report: report["actors_hung"] == 0, 10)
    assert back["actors_connected"] == actors
    training.until(lambda report: report["trajectories_dropped"] > dropped, 10)  # its late one
    training.until(lambda report: report["learner_steps"] > back["learner_steps"] + 20, 10)
    training.finish()
    assert training.error is None
    assert_learned_well(training, actors, 0)
    assert training.reports()[-1]["actors_restarted"] == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"actors": {"max_restarts": 0}}, "actors.max_restarts is 0"),
        ({"run": {"deterministic": True}}, "run.deterministic cannot go on without what it had to send"),
    ],
    ids=["no restarts", "lock-step"],
)
def test_a_killed_actor_ends_the_run_where_it_cannot_be_replaced(
    tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    sections = {name: {**settings} for name, settings in overrides.items()}
    training = Training(counting_config(tmp_path, ENDLESS, {"actors": {"placement": "process", "count": 2}}, sections))
    training.until(lambda report: report["learner_steps"] > 0, 90)
    actor_processes()[1].kill()
    training._thread.join(20)
    assert isinstance(training.error, WorkerError)
    assert "actor process 1 was killed by SIGKILL" in str(training.error)
    assert message in str(training.error)
    assert actor_processes() == []


ENDLESS: dict[str, Any] = {
    "run": {"environment_steps": 10**9},
    "environment": {"options": {"episode_length": 5, "step_seconds": 1e-3}},
}


def free_port() -> int:
    """One that is free, and the one after it as well."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                two.bind(("127.0.0.1", port + 1))
                return port


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
    address = f"tcp://127.0.0.1:{free_port()}"
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
    address = f"tcp://127.0.0.1:{free_port()}"
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


def test_an_actor_waits_for_its_learner_before_and_between(
    start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    path, address, _ = listening(tmp_path)
    actor = start("actor", str(path), "--connect", address)
    log = tmp_path / "actor.log"
    until_file_says(log, "no learner at " + address, actor)
    for meeting in range(2):
        learner = start("train", str(path))
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
