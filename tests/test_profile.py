"""A profile shows what JAX ran, and every trajectory's way from its unroll to its update on one timeline."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import tianji_jax
from short_runs import counting_config
from tianji_jax import profile, timeline
from tianji_jax.cli import main
from tianji_jax.timeline import Timeline
from tianji_jax.types import Stamp

UPDATES = 8


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Events of a timeline by the name of their track."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    tracks: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] != "M":
            tracks.setdefault(names[event["tid"]], []).append(event)
    return tracks


@pytest.mark.parametrize("placement", ["thread", "process"])
def test_the_timeline_has_all_threads_and_actors_and_arrows_that_end(
    tmp_path: Path, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some seconds, within which the slower of two processes has started as well.
    monkeypatch.setattr(profile, "FIRST_UPDATES", 250)
    config = counting_config(
        tmp_path,
        {
            "run": {"environment_steps": 6000},
            "actors": {"count": 2, "placement": placement},
            "environment": {"options": {"step_seconds": 1e-3}},
        },
    )
    folder = tianji_jax.train(config, show=False, profile=UPDATES).path / "profile"
    assert list(folder.rglob("*.xplane.pb"))
    tracks = read(folder / "timeline.json.gz")
    assert set(tracks) == {"actor 0", "actor 1", "receiver", "batcher", "dispatcher", "learner"}
    updates = [event for event in tracks["learner"] if event["name"] == "updating"]
    assert UPDATES - 3 <= len(updates) <= UPDATES + 1  # those at the edges are cut off
    versions = [event["args"]["version"] for event in updates]
    assert versions == sorted(versions)
    unrolls = [event for name in ("actor 0", "actor 1") for event in tracks[name] if event["name"] == "unroll"]
    # Five steps of four environments, which sleep in turn; one of five may only reset.
    assert all(event["dur"] >= 16_000 for event in unrolls)
    assert all(event["args"]["environment"] >= 0.016 for event in unrolls)
    arrows: dict[str, dict[str, float]] = {}
    for events in tracks.values():
        for event in events:
            if event["name"] == "trajectory":
                arrows.setdefault(event["id"], {})[event["ph"]] = event["ts"]
    whole = [arrow for arrow in arrows.values() if set(arrow) == {"s", "t", "f"}]
    assert len(whole) >= UPDATES - 3
    assert all(arrow["s"] <= arrow["t"] <= arrow["f"] for arrow in whole)


def test_arrows_touch_spans(tmp_path: Path) -> None:
    config = counting_config(tmp_path, {"run": {"environment_steps": 1200}})
    tracks = read(tianji_jax.train(config, show=False, profile=UPDATES).path / "profile" / "timeline.json.gz")
    for events in tracks.values():
        spans = [(event["ts"], event["ts"] + event["dur"]) for event in events if event["ph"] == "X"]
        for event in events:
            if event["ph"] in "st":
                assert any(begin <= event["ts"] <= end for begin, end in spans), event


def test_a_run_that_ends_within_the_profile_still_writes_it(tmp_path: Path) -> None:
    config = counting_config(tmp_path, {"run": {"environment_steps": 400}})
    path = tianji_jax.train(config, show=False, profile=1000).path
    assert read(path / "profile" / "timeline.json.gz")["learner"]


def test_nothing_is_kept_unless_it_records_and_never_more_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "EVENTS_LIMIT", 3)
    line = Timeline()
    line.span("a", "before", 0.0, 1.0)
    line.recording = True
    for number in range(5):
        line.span("a", f"span {number}", float(number), 1.0)
    line.arrow("a", Stamp(0, 1, 2), 0.5, "s")
    line.write(tmp_path / "t.json.gz")
    assert [event["name"] for event in read(tmp_path / "t.json.gz")["a"]] == ["span 0", "span 1", "span 2"]
    assert line.left_out == 3


def test_a_run_without_a_profile_leaves_none(tmp_path: Path) -> None:
    assert not (tianji_jax.train(counting_config(tmp_path), show=False).path / "profile").exists()


@pytest.mark.parametrize("number", ["0", "-3", "many"])
def test_a_number_of_updates_that_makes_no_sense_is_refused(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["train", "x.yaml", "--profile", number])
    assert error.value.code == 2
    assert "--profile" in capsys.readouterr().err
