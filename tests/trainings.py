"""Trainings that tests watch from outside while they run: every trajectory is known by its rewards."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import pytest

import tianji_jax
from short_runs import counting_config
from test_train import assert_account_balances
from tianji_jax.agent import Metrics
from tianji_jax.config import Config
from tianji_jax.testing import CountingEnv, TrivialAgent
from tianji_jax.types import Batch

ENDLESS: dict[str, Any] = {
    "run": {"environment_steps": 10**9},
    "environment": {"options": {"episode_length": 5, "step_seconds": 1e-3}},
}
T, B = 5, 2
NAP_SECONDS = 5.0
NUMBERS = 2**23
FINISHING = 2.0**30
FINISHED = 1e9
"""A return above all that is possible before the end is wanted, below those after."""


class UniqueEnv(CountingEnv):
    """Rewards are random numbers, by which trajectories are known; tells in files what it does.

    In `directory` there is a file for each environment of each life of an actor, named after its process and its seed,
    with a byte for each step and each reset after the first. Once there is a file `finish`, rewards are so high that
    the run ends. The one that finds a file `nap` removes it and sleeps.
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
        with contextlib.suppress(FileNotFoundError):
            (self._directory / "nap").unlink()
            time.sleep(NAP_SECONDS)
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
            for process in actor_processes():  # a test that failed may have left one stopped
                process.resume()
            self.finish()


def recorded(tmp_path: Path, **overrides: dict[str, Any]) -> Config:
    options = {"directory": str(tmp_path), "episode_length": T, "step_seconds": 2e-3}
    sections: dict[str, dict[str, Any]] = {
        "run": {"environment_steps": 10**9, "stop_at_return": FINISHED, "report_every_seconds": 0.1},
        "environment": {"name": "trainings:UniqueEnv", "options": options},
        "actors": {"environments": B, "unroll_length": T, "placement": "process"},
        "agent": {"name": "trainings:Recorder"},
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


@contextlib.contextmanager
def trainings(directory: Path) -> Iterator[Callable[..., Training]]:
    """What starts a training, which ends when the block does."""
    with contextlib.ExitStack() as running:

        def begin(**overrides: dict[str, Any]) -> Training:
            training = Training(recorded(directory, **overrides))
            running.callback(training.end)
            return training

        yield begin
