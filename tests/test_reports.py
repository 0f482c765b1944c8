"""What a whole run reports agrees with what an outsider counts."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from short_runs import counting_config, train, values
from tianji_jax import metrics
from tianji_jax.run_folder import METRICS
from tianji_jax.testing import CountingEnv

WINDOW_SECONDS = 2.0

taken: list[float] = []
"""When each environment step was taken, by all environments of this process."""


class TellingEnv(CountingEnv):
    def step(self, action: int) -> tuple:
        taken.append(time.monotonic())
        return super().step(action)


def test_rates_agree_with_a_stop_watch_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "RATE_SECONDS", WINDOW_SECONDS)
    overrides = {
        "run": {"environment_steps": 4000, "report_every_seconds": 0.5, "name": "r"},
        "environment": {"name": f"{__name__}:TellingEnv", "options": {"episode_length": 50, "step_seconds": 1e-3}},
    }
    taken.clear()
    run = threading.Thread(target=train, args=(counting_config(tmp_path, overrides),))
    run.start()
    reports: list[tuple[float, dict]] = []
    while run.is_alive():
        path = tmp_path / "r" / METRICS
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines[len(reports) :]:
            reports.append((time.monotonic(), json.loads(line)))
        time.sleep(0.005)
    run.join()
    compared = 0
    for at, report in reports[:-1]:
        # The reports that a rate is taken from are half a second apart.
        then = max((t for t, _ in reports if t <= at - WINDOW_SECONDS + 0.05), default=None)
        if then is None or not report["learner_steps"]:
            continue
        outside = sum(then <= t < at for t in taken) / (at - then)
        if outside > 500:  # all of it after the start
            assert report["environment_steps_per_second"] == pytest.approx(outside, rel=0.05)
            compared += 1
    assert compared >= 3
    # What was still under way when the run ended is not counted.
    in_flight = 20 * 4
    assert len(taken) - in_flight <= reports[-1][1]["environment_steps"] <= len(taken)


def test_frames_are_not_steps(tmp_path: Path) -> None:
    overrides = {
        "environment": {"name": "envpool:Pong-v5", "options": {"frame_skip": 4, "img_height": 42, "img_width": 42}}
    }
    _, reports = train(counting_config(tmp_path, overrides))
    for report in reports:
        assert report["frames"] == 4 * report["environment_steps"]
        assert report["frames_per_second"] == pytest.approx(4 * report["environment_steps_per_second"])
        assert report["frames_per_second_300"] == pytest.approx(4 * report["environment_steps_per_second_300"])


def test_a_run_without_a_finished_episode_reports_no_return(tmp_path: Path) -> None:
    endless = counting_config(tmp_path, {"environment": {"options": {"episode_length": 10**6}}})
    result, reports = train(endless)
    assert result.episode_return is None
    assert values(reports, "episode_return") == values(reports, "episode_length") == []
    assert reports[-1]["episodes"] == 0
    (tmp_path / "c.yaml").write_text(json.dumps({**endless.model_dump(mode="json"), "run": {"environment_steps": 400}}))
    command = [sys.executable, "-m", "tianji_jax.cli", "train", str(tmp_path / "c.yaml"), f"run.directory={tmp_path}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "no episode finished after 4" in shown
    assert "return" not in shown
    assert "nan" not in shown.lower()


def test_shares_of_time_add_up_to_one(tmp_path: Path) -> None:
    report = train(counting_config(tmp_path, {"run": {"environment_steps": 10_000}}))[1][-1]
    for who in ("actor", "receiver", "batcher", "dispatcher", "learner"):
        shares = [value for name, value in report.items() if name.startswith(f"{who}_time/")]
        assert sum(shares) == pytest.approx(1), who
    assert 0 < report["cores_used"] <= report["cores_busy"] + 0.5
