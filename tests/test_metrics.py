"""What is reported agrees with what happened."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from short_runs import counting_config
from tianji_jax import console, metrics
from tianji_jax.metrics import Meter
from tianji_jax.types import Episode


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    return clock


def test_rates_are_those_of_the_last_10_seconds_and_frames_are_not_steps(clock: Clock) -> None:
    meter = Meter(frame_skip=4)
    meter.experience(100, [])
    clock.now += 2
    first = meter.report()
    assert first["environment_steps_per_second"] == 50
    assert first["frames_per_second"] == 200
    assert first["frames"] == 400
    meter.experience(30, [])
    meter.updated({"loss": 1.0}, skipped=False)
    meter.updated({"loss": 2.0}, skipped=True)
    clock.now += 1
    second = meter.report()
    assert second["environment_steps_per_second"] == pytest.approx(130 / 3)
    assert second["environment_steps"] == 130
    assert second["learner_steps_per_second"] == pytest.approx(2 / 3)
    assert second["learner/loss"] == 1.5
    assert second["updates_skipped"] == 1
    assert second["wall_seconds"] == 3
    clock.now += 9.5
    # Counted from the first report, 10.5 seconds ago: the start is out of the window.
    assert meter.report()["environment_steps_per_second"] == pytest.approx(30 / 10.5)
    clock.now += 20
    assert meter.report()["environment_steps_per_second"] == 0


def test_the_return_is_the_mean_of_the_last_100_episodes_and_absent_before_the_first() -> None:
    meter = Meter()
    assert "episode_return" not in meter.report()
    meter.experience(0, [Episode(1000.0, 7)] * 50)
    assert not meter.reached(1000.0)
    meter.experience(0, [Episode(float(i), 5) for i in range(100)])
    report = meter.report()
    assert report["episode_return"] == 49.5
    assert report["episode_length"] == 5
    assert report["episodes"] == 150
    assert meter.reached(49.5)
    assert not meter.reached(49.6)


def test_values_that_are_not_finite_are_absent() -> None:
    meter = Meter()
    meter.updated({"loss": float("nan"), "kl": 1.0}, skipped=True)
    report = meter.report()
    assert report["learner/kl"] == 1.0
    assert "learner/loss" not in report


@pytest.mark.parametrize(("seconds", "text"), [(None, "-"), (59.4, "59s"), (185, "3m 05s"), (7620, "2h 07m")])
def test_durations_read_as_people_say_them(seconds: float | None, text: str) -> None:
    assert console.duration(seconds) == text


@pytest.mark.parametrize("width", [80, 160])
def test_the_panel_fits_the_terminal_and_shows_the_figures(
    tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.StringIO()
    terminal = Console(file=output, force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(console, "Console", lambda: terminal)
    meter = Meter()
    meter.experience(300, [Episode(12.5, 10)])
    meter.consumed([0, 1], 20)
    meter.updated({"loss": 0.25, "entropy": 0.5}, skipped=False)
    counts = {f"trajectories_{name}": 7 for name in ("received", "consumed", "dropped", "rejected", "queued")}
    report = {**meter.report(), **counts, "policy_version": 3, "device_queue_fill": 0.5}
    with console.display(counting_config(tmp_path), "title of the run", "where it lies", show=True) as shown:
        shown.show(report, final=True)
    text = output.getvalue()
    for figure in ("12.5", "300", "0 / 0.5 / 1", "50% of 2", "7, 7", "0.25", "title of the run", "where it lies"):
        assert figure in text
    assert max(len(line) for line in text.splitlines() if "\x1b" not in line) <= width
