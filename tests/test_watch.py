"""A run is watched from another process while it trains, and after it has ended."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from short_runs import counting_config, train
from tianji_jax.cli import main
from tianji_jax.run_folder import LOCK, METRICS, held, is_held
from tianji_jax.watch import follow


def test_reports_are_followed_until_the_run_ends_and_cut_off_lines_are_waited_for(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    seen = []

    def watch() -> None:
        seen.extend(dict(report) for report in follow(tmp_path))

    with held(tmp_path):
        path.write_text('{"a": 1}\n{"b": ')
        watcher = threading.Thread(target=watch)
        watcher.start()
        while not seen:
            time.sleep(0.01)
        with path.open("a") as file:
            file.write('2}\n{"a": 3}\n')
        time.sleep(0.1)
        assert watcher.is_alive()
    watcher.join(5)
    assert not watcher.is_alive()
    assert seen == [{"a": 1}, {"a": 3, "b": 2}]


def test_a_resumed_run_whose_reports_were_taken_back_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    with held(tmp_path):
        path.write_text('{"a": 1}\n{"a": 2}\n')
        reports = follow(tmp_path)
        assert next(reports) == {"a": 2}
        path.write_text('{"a": 1}\n')
        assert next(reports) == {"a": 1}
        reports.close()


def test_who_looks_does_not_hold(tmp_path: Path) -> None:
    assert not is_held(tmp_path)
    with held(tmp_path):
        assert is_held(tmp_path)
    assert not is_held(tmp_path)
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            is_held(tmp_path)

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for _ in range(200):
            with held(tmp_path):
                pass
    finally:
        stop.set()
        looker.join()
    assert (tmp_path / LOCK).exists()


def test_a_run_that_trains_is_watched_to_its_end(tmp_path: Path) -> None:
    overrides = {"environment": {"options": {"step_seconds": 2e-3}}, "run": {"environment_steps": 800, "name": "r"}}
    run = threading.Thread(target=train, args=(counting_config(tmp_path, overrides),))
    run.start()
    while not (tmp_path / "r" / METRICS).exists():
        time.sleep(0.01)
    watched = subprocess.run(
        [sys.executable, "-m", "tianji_jax.cli", "watch", str(tmp_path / "r")], capture_output=True, text=True
    )
    run.join()
    assert watched.returncode == 0, watched.stderr
    last = json.loads((tmp_path / "r" / METRICS).read_text().splitlines()[-1])
    assert f"steps {last['environment_steps']:,}" in watched.stdout
    assert watched.stdout.endswith("the run has ended\n")


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "nothing")]) == 2
    assert "no run there (config.yaml is missing)" in capsys.readouterr().err
