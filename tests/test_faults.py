"""However a part of the run fails, the run ends soon, with that part's traceback and the right exit code."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import psutil
import pytest
import yaml

from short_runs import counting_config, train
from tianji_jax.agent import Metrics
from tianji_jax.config import to_yaml
from tianji_jax.interrupts import interrupts
from tianji_jax.testing import TrivialAgent
from tianji_jax.worker import WorkerError, Workers

SECONDS = 10
"""A failed run may take this long to end, its start not counted."""


class FailingUpdate(TrivialAgent):
    """Raises while its update is traced."""

    def update(self, *_: Any) -> tuple[Any, Metrics]:
        raise ArithmeticError("this update fails")


class NeverFinite(TrivialAgent):
    """No update of its is one that counts."""

    def update(self, *arguments: Any) -> tuple[Any, Metrics]:
        train_state, metrics = super().update(*arguments)
        return train_state, {**metrics, "loss": jnp.nan}


def write(tmp_path: Path, *overrides: dict[str, Any]) -> Path:
    path = tmp_path / "run.yaml"
    tree = yaml.safe_load(to_yaml(counting_config(tmp_path / "runs", *overrides)))
    path.write_text(yaml.safe_dump(tree))
    return path


Start = Callable[[Path], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a training; whatever still runs when the test is over is killed."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "XLA_FLAGS": ""}
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as processes:

        def run(path: Path) -> "subprocess.Popen[str]":
            command = [sys.executable, "-m", "tianji_jax.cli", "train", str(path)]
            process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
            processes.enter_context(process)
            processes.callback(process.kill)
            return process

        yield run


def descendants(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def until_training(path: Path, process: "subprocess.Popen[str]") -> None:
    """Wait until the run has made updates."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        reports = list((path.parent / "runs").glob("*/metrics.jsonl"))
        if reports and '"learner/loss"' in reports[0].read_text():
            return
        time.sleep(0.05)
    pytest.fail(f"no update within 60 s; exit code {process.poll()}")


ENDLESS = {"run": {"environment_steps": 10**9}, "environment": {"options": {"episode_length": 5, "step_seconds": 1e-3}}}


@pytest.mark.parametrize("placement", ["thread", "process"])
def test_an_environment_that_raises_ends_the_run_with_its_traceback(
    start: Start, tmp_path: Path, placement: str
) -> None:
    path = write(
        tmp_path, ENDLESS, {"environment": {"options": {"fail_at_step": 300}}, "actors": {"placement": placement}}
    )
    process = start(path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "in step" in errors
    assert "CountingEnv fails at step 300" in errors
    assert "Traceback" in errors


def test_an_update_that_cannot_be_traced_shows_its_traceback_before_anything_starts(
    start: Start, tmp_path: Path
) -> None:
    path = write(tmp_path, ENDLESS, {"agent": {"name": "test_faults:FailingUpdate"}})
    process = start(path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "in update" in errors
    assert "this update fails" in errors
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.parametrize("part", ["Receiver.run", "Batcher.run", "Publisher.run", "Learner.run", "Run._compile"])
def test_an_error_in_any_thread_reaches_the_caller(tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import tianji_jax.run as run

    owner, method = part.split(".")

    def fail(*_: Any) -> None:
        raise OSError(f"{part} fails")

    monkeypatch.setattr(getattr(run, owner), method, fail)
    config = counting_config(tmp_path, ENDLESS)
    began = time.monotonic()
    with pytest.raises(WorkerError, match=f"OSError: {part} fails") as caught:
        train(config)
    assert isinstance(caught.value.__cause__, OSError)
    assert time.monotonic() - began < SECONDS


def test_a_run_that_is_stopped_does_not_wait_for_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA takes minutes for large networks and cannot be interrupted."""
    import tianji_jax.run as run

    compiling, done = threading.Event(), threading.Event()

    def compile_for_long(*_: Any) -> None:
        compiling.set()
        done.wait(60)

    def interrupt() -> None:
        compiling.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(run.Run, "_compile", compile_for_long)
    threading.Thread(target=interrupt).start()
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            train(counting_config(tmp_path, ENDLESS))
        assert time.monotonic() - began < SECONDS
    finally:
        done.set()


def test_an_actor_process_killed_once_too_often_ends_the_run_and_is_named(start: Start, tmp_path: Path) -> None:
    path = write(tmp_path, ENDLESS, {"actors": {"placement": "process", "count": 2, "max_restarts": 0}})
    process = start(path)
    until_training(path, process)
    children = descendants(process)
    assert len(children) == 2
    children[1].send_signal(signal.SIGKILL)
    began = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < SECONDS
    assert process.returncode == 1
    assert "was killed by SIGKILL" in errors
    assert not any(child.is_running() for child in children)


@pytest.mark.parametrize("placement", ["thread", "process"])
def test_ctrl_c_ends_the_run_within_5_seconds_and_leaves_nothing(start: Start, tmp_path: Path, placement: str) -> None:
    path = write(tmp_path, ENDLESS, {"actors": {"placement": placement, "count": 2}})
    process = start(path)
    until_training(path, process)
    children = descendants(process)
    assert len(children) == (2 if placement == "process" else 0)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < 5
    assert process.returncode == 130
    assert "stopped" in errors
    assert "Traceback" not in errors
    assert not any(child.is_running() for child in children)


@pytest.mark.parametrize("seconds", [0.5, 1.0, 1.5, 2.0, 3.0])
def test_ctrl_c_during_the_start_ends_it_too(start: Start, tmp_path: Path, seconds: float) -> None:
    process = start(write(tmp_path, ENDLESS, {"actors": {"placement": "process"}}))
    time.sleep(seconds)
    children = descendants(process)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < 5
    # On a busy machine the interpreter may not have come as far as the program.
    assert process.returncode in (130, -signal.SIGINT), errors
    assert not any(child.is_running() for child in children)


def test_ctrl_c_is_not_lost_where_python_swallows_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage collection runs callbacks of JAX; an exception in one is printed and forgotten."""

    def press(phase: str, _: Any) -> None:
        if phase == "start":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    stop = threading.Event()
    with interrupts() as interruption:
        gc.callbacks.append(press)
        try:
            gc.collect()
        finally:
            gc.callbacks.remove(press)
        interruption.stop_by(stop)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            interruption.check()


def test_a_second_ctrl_c_ends_the_process_at_once() -> None:
    code = (
        "import os, signal, threading\n"
        "from tianji_jax.interrupts import interrupts\n"
        "with interrupts() as interruption:\n"
        "    interruption.stop_by(threading.Event())\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    print('still here', flush=True)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    print('never')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert done.stdout == "still here\n"


def test_actor_processes_end_when_their_learner_is_killed(start: Start, tmp_path: Path) -> None:
    path = write(tmp_path, ENDLESS, {"actors": {"placement": "process", "count": 2}})
    process = start(path)
    until_training(path, process)
    children = descendants(process)
    process.kill()
    process.communicate()
    gone, alive = psutil.wait_procs(children, timeout=SECONDS)
    assert not alive
    assert len(gone) == 2


def test_two_runs_at_once_get_folders_of_their_own(start: Start, tmp_path: Path) -> None:
    path = write(tmp_path, {"run": {"environment_steps": 400}})
    processes = [start(path) for _ in range(2)]
    outputs = [process.communicate(timeout=90) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    folders = sorted(folder.name for folder in (tmp_path / "runs").iterdir())
    assert folders == ["CountingEnv_tianji_jax.testing-TrivialAgent", "CountingEnv_tianji_jax.testing-TrivialAgent-2"]


def test_workers_report_the_first_error_and_who_is_left() -> None:
    workers = Workers()
    workers.start("deaf", lambda stop: time.sleep(1.5))
    workers.start("first", lambda stop: (_ for _ in ()).throw(KeyError("first")))
    assert workers.stop.wait(5)
    workers.fail("second", ValueError("second"))
    with pytest.raises(WorkerError, match="first failed: KeyError"):
        workers.check()
    assert workers.close(0.1) == ["deaf"]
    assert workers.close(5) == []


def test_a_run_that_ends_with_an_update_that_was_undone_saves_what_it_had(tmp_path: Path) -> None:
    learner = {"learner": {"max_bad_updates": 10**6}, "agent": {"name": "test_faults:NeverFinite"}}
    result, _ = train(counting_config(tmp_path, {"run": {"environment_steps": 200}}, learner))
    assert [path for path in (result.path / "checkpoints").iterdir() if path.name.isdigit()]
