"""Reports reach their places, and a place that fails or is slow costs reports, never the training."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

import tianji_jax
from short_runs import counting_config
from tianji_jax.config import ConfigError
from tianji_jax.sinks import BACKLOG, JsonLines, Sinks


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would read: length, its checksum, an event, its checksum, and so on."""
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            assert int.from_bytes(data[8:12], "little") == masked_crc32c(data[:8])
            event = Event.FromString(data[12 : 12 + length])
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
            data = data[16 + length :]
    return found


def test_a_run_writes_events_that_agree_with_its_reports(tmp_path: Path) -> None:
    result = tianji_jax.train(counting_config(tmp_path), show=False)
    reports = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]
    events = scalars(result.path)
    for name in ("environment_steps", "episode_return", "learner/loss", "trajectories_consumed"):
        expected = [(report["environment_steps"], report[name]) for report in reports if name in report]
        assert [step for step, _ in events[name]] == [step for step, _ in expected]
        assert [value for _, value in events[name]] == pytest.approx([value for _, value in expected], rel=1e-6)


def test_tensorboard_can_be_turned_off(tmp_path: Path) -> None:
    result = tianji_jax.train(counting_config(tmp_path, {"metrics": {"tensorboard": False}}), show=False)
    assert not list(result.path.glob("events.*"))
    assert (result.path / "metrics.jsonl").exists()


def test_weights_and_biases_gets_every_report_and_a_run_that_goes_on_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline: what would be sent is kept in a file."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DISABLE_CODE", "true")
    path = tianji_jax.train(
        counting_config(tmp_path, {"metrics": {"wandb_project": "p"}, "run": {"name": "r"}}), show=False
    ).path
    reports = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert reports[-1]["reports_lost"] == 0
    (kept,) = path.glob("wandb/offline-run-*/*.wandb")
    assert (path / "wandb_id").read_text() in kept.name
    data = kept.read_bytes()
    # Reports of the same environment step are one record.
    assert data.count(b"environment_steps_per_second_300") >= len({report["environment_steps"] for report in reports})
    assert b"limited_by" in data
    longer = counting_config(
        tmp_path, {"metrics": {"wandb_project": "p"}, "run": {"name": "r", "environment_steps": 800}}
    )
    tianji_jax.train(longer, show=False, resume=path)
    assert len({kept.stem for kept in path.glob("wandb/offline-run-*/*.wandb")}) == 1


def test_a_sink_that_is_not_installed_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = counting_config(tmp_path / "runs", {"metrics": {"wandb_project": "p"}})
    with pytest.raises(ConfigError, match=r"pip install 'tianji_jax\[wandb\]'"):
        tianji_jax.train(config, show=False)
    assert not (tmp_path / "runs").exists()


def test_a_full_disk_is_told_once_and_counted_and_the_others_get_their_reports(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Sinks({"full": JsonLines(Path("/dev/full")), "good": JsonLines(tmp_path / "good")}) as sinks:
        for number in range(5):
            sinks.put({"number": number})
    assert sinks.lost >= 5
    assert caplog.text.count("full: a report was lost (OSError") == 1
    numbers = [json.loads(line)["number"] for line in (tmp_path / "good").read_text().splitlines()]
    assert numbers == [0, 1, 2, 3, 4]


class Stuck:
    """A sink on a file system that does not answer."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def write(self, report: dict[str, Any]) -> None:
        self.free.wait()

    def close(self) -> None:
        pass


def test_a_sink_that_hangs_holds_up_nobody(caplog: pytest.LogCaptureFixture) -> None:
    stuck = Stuck()
    began = time.monotonic()
    with Sinks({"stuck": stuck}) as sinks:
        for number in range(BACKLOG + 11):
            sinks.put({"number": number})
        assert time.monotonic() - began < 1
    assert time.monotonic() - began < 10
    assert sinks.lost >= 10
    assert "slower than the reports come" in caplog.text
    stuck.free.set()
