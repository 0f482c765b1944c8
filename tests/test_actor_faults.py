"""Actor processes that are killed, stopped and let go on while training runs."""

import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from short_runs import counting_config
from tianji_jax.worker import WorkerError
from trainings import ENDLESS, NAP_SECONDS, T, Training, actor_processes, assert_learned_well, trainings


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Starts a training, which ends when the test does."""
    with trainings(tmp_path) as begin:
        yield begin


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


@pytest.mark.parametrize("seconds", [10, pytest.param(60, marks=pytest.mark.slow)])
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
    # Who acts has a credit, and the next one too at times.
    assert 0 < last["trajectories_lost"] <= 2 * killed


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


def test_an_environment_that_sleeps_stops_its_actor_only(train: Callable[..., Training], tmp_path: Path) -> None:
    """With actors that are threads."""
    training = train(
        actors={"count": 3, "placement": "thread", "hang_seconds": 0.5},
        staleness={"max_lag": 0},
        learner={"devices": 1, "trajectories_per_update": 3},
    )
    training.until(lambda report: report["learner_steps"] > 50, 60)
    (tmp_path / "nap").touch()
    hung = training.until(lambda report: report["actors_hung"] == 1, NAP_SECONDS)
    training.until(lambda report: report["learner_steps"] > hung["learner_steps"] + 10, NAP_SECONDS)
    assert (training.reports()[-1]["actors_hung"], training.reports()[-1]["actors_connected"]) == (1, 3)
    training.until(lambda report: report["actors_hung"] == 0, 2 * NAP_SECONDS)
    training.finish()
    assert training.error is None
    assert_learned_well(training, 3, 0)


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
