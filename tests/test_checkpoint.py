"""Runs that are saved, killed and gone on with: nothing changes and nothing is lost but what came after the save."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

import tianji_jax
from short_runs import cartpole_config, counting_config, values
from tianji_jax.agent import Metrics
from tianji_jax.blueprint import plan
from tianji_jax.checkpoint import FOLDER, CheckpointError, Checkpoints, Saved, Snapshot, restore
from tianji_jax.config import CheckpointConfig, Config, ConfigError, to_yaml, validate
from tianji_jax.learner import init_state
from tianji_jax.parallel import Parallel
from tianji_jax.testing import TrivialAgent
from tianji_jax.types import Batch
from tianji_jax.worker import WorkerError

LOCK_STEP: dict[str, dict[str, Any]] = {
    "run": {"deterministic": True, "name": "run"},
    "actors": {"count": 2, "environments": 4, "unroll_length": 8},
    "staleness": {"max_lag": 2},
    "learner": {"trajectories_per_update": 3},
    "checkpoint": {"every_learner_steps": 10},
}


def state_of(config: Config, folder: Path, devices: int = 1, **which: Any) -> Saved:
    agent = plan(config).agent
    spec = Parallel(jax.devices()[:devices], "pmap").spec(jax.eval_shape(lambda: init_state(agent, 0)))
    return restore(folder, spec, **which)


def raw(state: Any) -> list[np.ndarray]:
    """The numbers of a state; those of its random key are the draws to come."""
    plain = state._replace(rng=jax.random.key_data(state.rng))
    return [np.asarray(x) for x in jax.tree.leaves(plain)]


def assert_same_state(a: Any, b: Any) -> None:
    for x, y in zip(raw(a), raw(b), strict=True):
        np.testing.assert_array_equal(x, y)


def reports_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


GRU = {"recurrence": "gru", "recurrent_size": 8}
SCHEDULE = {"learning_rate_schedule": "linear", "schedule_learner_steps": 30}


@pytest.mark.parametrize(
    "agent",
    [
        {"name": "ppo", "epochs": 2, "minibatches": 2, "normalise_observations": True, "normalise_rewards": True},
        pytest.param({"name": "ppo", "network": GRU, "minibatches": 1}, marks=pytest.mark.slow),
        pytest.param({"name": "impala", **SCHEDULE}, marks=pytest.mark.slow),
        {"name": "impala", "network": {"recurrence": "lstm", "recurrent_size": 8}},
    ],
    ids=["ppo", "ppo-gru", "impala-schedule", "impala-lstm"],
)
def test_a_resumed_run_repeats_the_one_that_was_not_interrupted(tmp_path: Path, agent: dict[str, Any]) -> None:
    def config(name: str, steps: int) -> Config:
        run = {"environment_steps": steps, "compilation_cache": str(tmp_path / "cache")}
        tree = cartpole_config(tmp_path / name, LOCK_STEP).model_dump(mode="json")
        return validate({**tree, "run": {**tree["run"], **run}, "agent": {"learning_rate": 1e-3, **agent}})

    whole = config("whole", 2200)
    expected = tianji_jax.train(whole, show=False)
    assert expected.learner_steps >= 20
    tianji_jax.train(config("halves", 1300), show=False)
    resumed = tianji_jax.train(config("halves", 2200), show=False, resume=tmp_path / "halves" / "run")
    assert resumed.learner_steps == expected.learner_steps
    assert resumed.environment_steps == expected.environment_steps
    assert resumed.episode_return == expected.episode_return
    jax.tree.map(np.testing.assert_array_equal, resumed.train_state, expected.train_state)
    assert_same_state(state_of(whole, resumed.path).state, state_of(whole, expected.path).state)


@pytest.mark.parametrize(("before", "after"), [((4, "pmap"), (2, "shard_map")), ((1, "shard_map"), (4, "pmap"))])
def test_a_run_goes_on_with_other_devices_and_another_program(
    tmp_path: Path, before: tuple[int, str], after: tuple[int, str]
) -> None:
    def config(devices: int, parallel: str, steps: int) -> Config:
        learner = {"devices": devices, "parallel": parallel}
        return cartpole_config(tmp_path, {"run": {"name": "run", "environment_steps": steps}, "learner": learner})

    first = tianji_jax.train(config(*before, 600), show=False)
    saved = state_of(config(*after, 600), first.path, after[0])
    jax.tree.map(np.testing.assert_array_equal, saved.state.train_state, first.train_state)
    second = tianji_jax.train(config(*after, 1200), show=False, resume=first.path)
    assert second.learner_steps > first.learner_steps
    assert second.environment_steps >= 1200


def test_counters_and_returns_go_on(tmp_path: Path) -> None:
    def config(steps: int) -> Config:
        return counting_config(tmp_path, {"run": {"name": "run", "environment_steps": steps}})

    first = tianji_jax.train(config(400), show=False)
    second = tianji_jax.train(config(1000), show=False, resume=first.path)
    assert second.environment_steps >= 1000
    assert int(second.train_state.steps) == second.environment_steps
    reports = reports_of(first.path)
    for name in ("environment_steps", "learner_steps", "episodes", "wall_seconds", "trajectories_consumed"):
        assert values(reports, name) == sorted(values(reports, name))
    last = reports[-1]
    settled = last["trajectories_consumed"] + last["trajectories_dropped"] + last["trajectories_rejected"]
    assert last["trajectories_received"] == settled + last["trajectories_queued"]


def test_a_run_that_is_over_is_over_when_it_is_resumed(tmp_path: Path) -> None:
    config = counting_config(tmp_path, {"run": {"name": "run"}})
    first = tianji_jax.train(config, show=False)
    again = tianji_jax.train(config, show=False, resume=first.path)
    assert again.environment_steps == first.environment_steps
    assert again.learner_steps == first.learner_steps


def test_what_lies_after_the_checkpoint_a_run_goes_on_from_is_forgotten(tmp_path: Path) -> None:
    def config(steps: int) -> Config:
        return counting_config(tmp_path, LOCK_STEP, {"run": {**LOCK_STEP["run"], "environment_steps": steps}})

    first = tianji_jax.train(config(1000), show=False)
    assert first.learner_steps % 10  # its last checkpoint is not one that a run in lock-step goes on from
    second = tianji_jax.train(config(1000), show=False, resume=first.path)
    assert second.learner_steps == first.learner_steps
    reports = reports_of(first.path)
    assert values(reports, "learner_steps") == sorted(values(reports, "learner_steps"))


def test_a_change_of_shapes_is_refused_and_names_the_arrays(tmp_path: Path) -> None:
    first = tianji_jax.train(cartpole_config(tmp_path, {"run": {"name": "run"}}), show=False)
    config = cartpole_config(tmp_path, {"agent": {"name": "ppo", "network": {"hidden_sizes": [24]}, "minibatches": 2}})
    with pytest.raises(ConfigError, match=r"(?s)does not fit.*kernel.*float32\[4, 16\] in the checkpoint.*24\] here"):
        tianji_jax.train(config, show=False, resume=first.path)


def test_what_is_no_run_or_has_no_checkpoint_is_refused(tmp_path: Path) -> None:
    config = counting_config(tmp_path)
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        tianji_jax.train(config, show=False, resume=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"checkpoint.every_learner_steps is null"):
        tianji_jax.train(counting_config(tmp_path, {"run": {"deterministic": True}}), show=False, resume=tmp_path)


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=2), lock_step=False)
    returns = [None, 5.0, 9.0, 7.0, 8.0, 6.0]
    for version, value in enumerate(returns, start=1):
        checkpoints.save(Snapshot(version, {"w": jax.numpy.full(3, version)}, {}, value))
    checkpoints.close()
    kept = {int(path.name) for path in (tmp_path / FOLDER).iterdir() if path.name.isdigit()}
    assert kept == {3, 5, 6}
    like = {"w": jax.ShapeDtypeStruct((3,), np.int32)}
    assert restore(tmp_path, like).version == 6
    best = restore(tmp_path, like, best=True)
    assert best.version == 3
    np.testing.assert_array_equal(best.state["w"], [3, 3, 3])


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), lock_step=False)
    for version in (1, 2, 3):
        checkpoints.save(Snapshot(version, {"w": jax.numpy.full(3, version)}, {}, None))
    checkpoints.close()
    (tmp_path / FOLDER / "3" / "progress" / "metadata").write_text("{")
    for data in (tmp_path / FOLDER / "2" / "state").rglob("*"):
        if data.is_file() and "ocdbt" in str(data):
            data.write_bytes(b"")
    saved = restore(tmp_path, {"w": jax.ShapeDtypeStruct((3,), np.int32)})
    assert saved.version == 1
    assert caplog.text.count("cannot be read") == 2


def test_a_save_that_fails_is_told_and_the_one_before_stays(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), lock_step=False)
    checkpoints.save(Snapshot(1, {"w": jax.numpy.zeros(3)}, {}, None))
    code = (
        "import resource, sys, pathlib, jax.numpy as jnp\n"
        "from tianji_jax.checkpoint import *\n"
        "from tianji_jax.config import CheckpointConfig\n"
        "import orbax.checkpoint\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "c = Checkpoints(pathlib.Path(sys.argv[1]), CheckpointConfig(), False)\n"
        "noise = __import__('jax').random.normal(__import__('jax').random.key(0), (1000, 1000))\n"
        "try:\n"
        "    c.save(Snapshot(2, {'w': noise}, {}, None))\n"
        "except CheckpointError as error:\n"
        "    print('refused', c.failed, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("refused 1 no checkpoint of version 2"), done.stderr
    assert restore(tmp_path, {"w": jax.ShapeDtypeStruct((3,), np.float32)}).version == 1


def test_a_run_that_cannot_be_saved_trains_on_and_says_so_at_the_end(tmp_path: Path) -> None:
    checkpoint = {"every_learner_steps": 3}
    config = counting_config(tmp_path, {"run": {"name": "run"}, "checkpoint": checkpoint})
    done: list[str] = []

    class Blocking(Checkpoints):
        def __init__(self, folder: Path, *rest: Any) -> None:
            super().__init__(folder, *rest)
            (folder / FOLDER).write_text("in the way")
            done.append("blocked")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tianji_jax.run.Checkpoints", Blocking)
        with pytest.raises(CheckpointError, match="no checkpoint of version"):
            tianji_jax.train(config, show=False)
    last = reports_of(tmp_path / "run")[-1]
    assert done == ["blocked"]
    assert last["environment_steps"] >= 400
    assert last["checkpoints_failed"] >= 1


def small(version: int) -> Snapshot:
    return Snapshot(version, {"w": jnp.full(3, float(version))}, {}, None)


class Slow(Checkpoints):
    """Takes its time, and notes who is saving when."""

    def _save(self, snapshot: Snapshot) -> None:
        self.saving = getattr(self, "saving", 0) + 1
        assert self.saving == 1, "two saves at once"
        time.sleep(0.3)
        super()._save(snapshot)
        self.saving -= 1


def test_the_last_save_waits_for_the_one_before_and_what_waits_is_saved(tmp_path: Path) -> None:
    checkpoints, stop = Slow(tmp_path, CheckpointConfig(), lock_step=False), threading.Event()
    worker = threading.Thread(target=checkpoints.run, args=(stop,))
    worker.start()
    checkpoints.put(small(1), stop)
    time.sleep(0.1)  # being saved
    checkpoints.put(small(2), stop)  # waits
    stop.set()
    checkpoints.save(small(3))
    worker.join(20)
    assert not worker.is_alive()
    checkpoints.close()
    assert checkpoints.failed == 0
    for version in (1, 2, 3):
        assert (tmp_path / FOLDER / str(version)).is_dir()
    assert restore(tmp_path, {"w": jax.ShapeDtypeStruct((3,), np.float32)}).version == 3


def test_a_learner_hands_over_one_snapshot_at_a_time(tmp_path: Path) -> None:
    checkpoints, stop = Slow(tmp_path, CheckpointConfig(), lock_step=False), threading.Event()
    checkpoints.put(small(1), stop)
    waits = threading.Thread(target=checkpoints.put, args=(small(2), stop))
    waits.start()
    waits.join(0.3)
    assert waits.is_alive()
    stop.set()  # nobody saves any more
    waits.join(5)
    assert not waits.is_alive()


class Poisoned(TrivialAgent):
    """Its second device's gradient is not a number once there have been five updates."""

    def update(self, train_state: Any, batch: Batch, rng: jax.Array, axis_name: str) -> tuple[Any, Metrics]:
        here = (train_state.updates >= 5) & (jax.lax.axis_index(axis_name) == 1)
        reward = batch.trajectory.reward + jnp.where(here, jnp.nan, 0)
        return super().update(
            train_state, batch._replace(trajectory=batch.trajectory._replace(reward=reward)), rng, axis_name
        )


def test_what_is_not_finite_on_one_device_ends_the_run_with_the_parameters_from_before(tmp_path: Path) -> None:
    learner = {"devices": 2, "max_bad_updates": 3}
    config = counting_config(
        tmp_path,
        {"run": {"name": "run", "environment_steps": 10**6}, "learner": learner},
        {"agent": {"name": "test_checkpoint:Poisoned"}, "checkpoint": {"every_learner_steps": 5}},
    )
    with pytest.raises(WorkerError, match="3 updates in a row gave values that are not finite"):
        tianji_jax.train(config, show=False)
    run = tmp_path / "run"
    assert reports_of(run)[-1]["updates_skipped"] >= 3
    saved = state_of(config, run, 2)
    assert saved.version == 5
    assert int(saved.state.train_state.updates) == 5
    assert all(np.isfinite(x).all() for x in raw(saved.state))


# --- processes ---------------------------------------------------------------------------------------------------

CLI = [sys.executable, "-m", "tianji_jax.cli"]


def start(*arguments: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "XLA_FLAGS": ""}
    return subprocess.Popen(
        [*CLI, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def write(config: Config, tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(to_yaml(config))))
    return path


def until_saved(run: Path, process: "subprocess.Popen[str]", after: int = 0) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if any(path.name.isdigit() and int(path.name) > after for path in (run / FOLDER).glob("*")):
            return
        time.sleep(0.02)
    pytest.fail(f"no checkpoint within 60 s; exit code {process.poll()}")


SLOW = {"environment": {"options": {"episode_length": 5, "step_seconds": 1e-3}}}


def test_sigterm_saves_and_asks_to_be_started_again(tmp_path: Path) -> None:
    config = counting_config(tmp_path / "runs", SLOW, {"run": {"name": "run", "environment_steps": 10**9}})
    run = tmp_path / "runs" / "run"
    with start("train", str(write(config, tmp_path))) as process:
        while process.poll() is None and not values(
            reports_of(run) if (run / "metrics.jsonl").exists() else [], "learner/loss"
        ):
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 75, errors
    assert f"stopped; go on with: tianji train --resume {run}" in errors
    steps = reports_of(run)[-1]["environment_steps"]
    with start("train", "--resume", str(run), f"run.environment_steps={steps + 200}") as process:
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "changed: run.environment_steps: 1000000000 ->" in output
    assert reports_of(run)[-1]["environment_steps"] >= steps + 200


def test_one_process_at_a_time_trains_in_a_folder(tmp_path: Path) -> None:
    checkpoint = {"every_learner_steps": 5}
    run = tmp_path / "runs" / "run"
    changes = {"run": {"name": "run", "environment_steps": 10**9}, "checkpoint": checkpoint}
    with start("train", str(write(counting_config(tmp_path / "runs", SLOW, changes), tmp_path))) as process:
        until_saved(run, process)
        with start("train", "--resume", str(run)) as second:
            _, errors = second.communicate(timeout=60)
        assert second.returncode == 2
        assert "another process is training in" in errors
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_a_trainer_killed_at_any_moment_reaches_its_end(tmp_path: Path, kills: int) -> None:
    """Some of the moments are in a save: there is one after every second update."""
    draw = random.Random(3)
    run = tmp_path / "runs" / "run"
    changes = {"run": {"name": "run", "environment_steps": 10**9}, "checkpoint": {"every_learner_steps": 2}}
    arguments = ["train", str(write(counting_config(tmp_path / "runs", SLOW, changes), tmp_path))]
    versions = [0]
    for _ in range(kills):
        with start(*arguments) as process:
            if draw.random() < 0.5 or versions == [0]:
                until_saved(run, process, after=versions[-1])
                time.sleep(draw.uniform(0, 0.5))
            else:
                time.sleep(draw.uniform(0.5, 4))
            process.kill()
            _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors
        versions.append(max(int(path.name) for path in (run / FOLDER).iterdir() if path.name.isdigit()))
        arguments = ["train", "--resume", str(run)]
    steps = reports_of(run)[-1]["environment_steps"] if (run / "metrics.jsonl").read_text().endswith("\n") else 0
    with start("train", "--resume", str(run), f"run.environment_steps={steps + 500}") as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert versions == sorted(versions)
    assert versions[-1] > versions[1]
    reports = reports_of(run)
    for name in ("environment_steps", "learner_steps", "episodes", "trajectories_consumed"):
        assert values(reports, name) == sorted(values(reports, name))
    assert reports[-1]["environment_steps"] >= steps + 500
