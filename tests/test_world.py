"""Several learner processes in one `jax.distributed` world: the same parameters as one process with the same batch.

Each test starts real processes, with CPU collectives between them and four devices in all.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from short_runs import cartpole_config, free_ports
from tianji_jax.config import Config, to_yaml

DEVICES = 4
CACHE = Path(tempfile.gettempdir()) / f"tianji-tests-{os.getuid()}"
"""Of compiled programs: these tests start some twenty processes with much the same."""

EVERY = 5
"""Learner steps between two checkpoints."""

CHILD = """
import os, sys
import jax
jax.config.update("jax_platforms", "cpu")
rank, size, address, config, resume = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5] or None
if size > 1:
    jax.distributed.initialize(address, size, rank)
import tianji_jax
try:
    result = tianji_jax.train(tianji_jax.load(config), show=False, resume=resume)
except BaseException as error:
    print(error, flush=True)
    os._exit(1)
print("ended", result.learner_steps, result.environment_steps, flush=True)
os._exit(0)
"""


def config_of(learners: int, folder: Path, **settings: Any) -> Config:
    """A lock-step run whose four actors and four devices are those of so many learners."""
    share = DEVICES // learners
    sections: dict[str, dict[str, Any]] = {
        "run": {"deterministic": True, "environment_steps": 2000, "name": "r", "compilation_cache": str(CACHE)},
        "actors": {"count": share, "environments": 4, "unroll_length": 8},
        "learner": {"trajectories_per_update": share, "devices": share},
        "agent": {"optimizer": "sgd", "learning_rate": 0.1, "epochs": 2, "minibatches": 2},
        "checkpoint": {"every_learner_steps": EVERY, "keep": 100},
    }
    for section, more in settings.items():
        sections[section] |= more
    base = cartpole_config(folder)
    return cartpole_config(folder, {**sections, "agent": {**base.agent, **sections["agent"]}})


@contextlib.contextmanager
def learners(configs: list[Config], resume: Path | None = None) -> Iterator[list["subprocess.Popen[str]"]]:
    """A process for each configuration."""
    size, address = len(configs), f"127.0.0.1:{free_ports()}"
    flags = f"--xla_force_host_platform_device_count={DEVICES // size}"
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as processes:
        started = []
        for rank, config in enumerate(configs):
            path = Path(scratch) / f"{rank}.yaml"
            path.write_text(to_yaml(config))
            command = [sys.executable, "-c", CHILD, str(rank), str(size), address, str(path), str(resume or "")]
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "XLA_FLAGS": flags},
            )
            processes.callback(process.communicate)
            processes.callback(process.kill)
            started.append(process)
        yield started


def train(configs: list[Config], resume: Path | None = None) -> list[str]:
    """Run to the end; what each process printed last."""
    with learners(configs, resume) as processes:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
        for process, output in zip(processes, outputs, strict=True):
            assert process.returncode == 0, output
    return [output.splitlines()[-1] for output in outputs]


def parameters(folder: Path, version: int) -> list[np.ndarray]:
    with ocp.CheckpointManager(
        folder / "r" / "checkpoints", options=ocp.CheckpointManagerOptions(create=False)
    ) as manager:
        state = manager.restore(version, args=ocp.args.Composite(state=ocp.args.StandardRestore())).state
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def distance(one: Path, other: Path, version: int) -> float:
    pairs = zip(parameters(one, version), parameters(other, version), strict=True)
    return max(float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64)), initial=0.0)) for a, b in pairs)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    train([config_of(1, folder)])
    return folder


@pytest.mark.parametrize(
    ("size", "mode"),
    [
        (2, "pmap"),
        (2, "shard_map"),
        pytest.param(4, "pmap", marks=pytest.mark.slow),
        pytest.param(4, "shard_map", marks=pytest.mark.slow),
    ],
)
def test_several_learners_learn_what_one_with_the_same_batch_learns(
    tmp_path: Path, alone: Path, size: int, mode: str
) -> None:
    config = config_of(size, tmp_path, learner={"parallel": mode})
    ended = train([config] * size)
    # All stop after the same update.
    assert len({line.split()[1] for line in ended}) == 1
    for version in (EVERY, 2 * EVERY):
        assert distance(alone, tmp_path, version) < 1e-6
    # They did learn something.
    assert any(np.any(a != b) for a, b in zip(parameters(alone, 5), parameters(alone, 10), strict=True))
    reports = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    steps = [report["environment_steps"] for report in reports]
    assert steps == sorted(steps)
    assert steps[-1] >= 2000  # of all learners together


def test_a_run_of_several_learners_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train([config_of(2, whole)] * 2)
    train([config_of(2, parts, run={"environment_steps": 1000})] * 2)
    train([config_of(2, parts)] * 2, resume=parts / "r")
    assert distance(whole, parts, 2 * EVERY) == 0


@pytest.mark.slow
def test_what_one_process_saved_two_go_on_with(tmp_path: Path, alone: Path) -> None:
    train([config_of(1, tmp_path, run={"environment_steps": 1000})])
    train([config_of(2, tmp_path)] * 2, resume=tmp_path / "r")
    assert distance(alone, tmp_path, 2 * EVERY) < 1e-6


def test_learners_with_different_settings_are_refused(tmp_path: Path) -> None:
    with learners([config_of(2, tmp_path), config_of(2, tmp_path, agent={"learning_rate": 0.2})]) as processes:
        output, _ = processes[1].communicate(timeout=60)
    assert processes[1].returncode == 1
    assert "agent.learning_rate is 0.2 here and 0.1 on learner 0" in output


def test_reuse_is_refused(tmp_path: Path) -> None:
    config = config_of(2, tmp_path, run={"deterministic": False})
    config = config.model_copy(update={"balance": config.balance.model_copy(update={"max_reuse": 1})})
    with learners([config] * 2) as processes:
        for process in processes:
            assert "balance.max_reuse=1: several learners" in process.communicate(timeout=60)[0]
