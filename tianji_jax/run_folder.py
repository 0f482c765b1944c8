"""The folder of a run: made once, held by one process, and taken back to the checkpoint that a run goes on from."""

import contextlib
import fcntl
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tianji_jax.config import Config, ConfigError

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
LOCK = "lock"

LOOK_SECONDS = 0.2
"""Somebody who only looks whether a folder is held may hold it for a moment."""


def make_run_folder(config: Config) -> Path:
    """Create the run's folder; runs that start at the same moment get different ones.

    Raises:
      ConfigError: a run of that name exists, or the folder cannot be made.
    """
    run = config.run
    environment = config.environment.name.partition(":")[2]
    name = run.name or f"{environment}_{config.agent['name']}".replace("/", "-").replace(":", "-")
    try:
        run.directory.mkdir(parents=True, exist_ok=True)
        for number in range(1, 100_000):
            path = run.directory / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir()
            except FileExistsError:
                if run.name:
                    raise ConfigError(
                        f"run.name: {path} exists already; choose another name, leave run.name out to get a number, "
                        f"or go on with it: tianji train --resume {path}"
                    ) from None
                continue
            return path
    except OSError as error:
        raise ConfigError(f"run.directory: cannot create a folder in {run.directory}: {error.strerror}") from None
    raise ConfigError(f"run.directory: {run.directory} holds too many runs called {name}")


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes from training in `folder`; the system lets go of it even if this process is killed.

    Raises:
      ConfigError: another process holds it, or it cannot be written to.
    """
    try:
        file = (folder / LOCK).open("w")
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None
    with file:
        deadline = time.monotonic() + LOOK_SECONDS
        while not _lock(file, fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                raise ConfigError(f"another process is training in {folder}")
            time.sleep(LOOK_SECONDS / 10)
        yield


def is_held(folder: Path) -> bool:
    """Whether a process is training in `folder`."""
    try:
        file = (folder / LOCK).open()
    except OSError:
        return False
    with file:
        return not _lock(file, fcntl.LOCK_SH)


def _lock(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def rewind_metrics(folder: Path, learner_steps: int, environment_steps: int) -> None:
    """Forget the reports of what a killed process did after its last checkpoint.

    Args:
      folder: of the run.
      learner_steps: at the checkpoint.
      environment_steps: likewise; a report counts those of a batch before the update on it has finished.
    """
    path = folder / METRICS
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        # The last line may be cut off.
        with contextlib.suppress(ValueError):
            report = json.loads(line)
            if report["learner_steps"] <= learner_steps and report["environment_steps"] <= environment_steps:
                kept.append(line)
    rewritten = path.with_suffix(".rewritten")
    rewritten.write_text("".join(kept), encoding="utf-8")
    rewritten.replace(path)
