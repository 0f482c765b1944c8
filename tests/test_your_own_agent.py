"""What docs/your_own_agent.md says works: its files, written to an empty folder, learn by its commands."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

DOCUMENT = Path(__file__).parents[1] / "docs" / "your_own_agent.md"

MAX_LINES = 80
"""Of agent and environment together, blank ones not counted."""


def files_of(document: Path) -> dict[str, str]:
    """The files that a document has its reader write, by name."""
    return dict(re.findall(r"`([\w.]+)`:\n\n```(?:python|yaml)\n(.*?)^```", document.read_text(), re.M | re.S))


def files() -> dict[str, str]:
    return files_of(DOCUMENT)


def commands() -> list[str]:
    """The overrides of each training command, in the order of the document."""
    return re.findall(r"^PYTHONPATH=\. tianji train grid\.yaml ?(.*)$", DOCUMENT.read_text(), re.M)


def random_return(grid: Path, episodes: int = 500) -> float:
    """Mean return of a player who does not look."""
    spec = importlib.util.spec_from_file_location("grid_of_the_document", grid)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    env, rng, total = module.Grid(), np.random.default_rng(0), 0.0
    for episode in range(episodes):
        env.reset(seed=episode)
        over = False
        while not over:
            _, reward, terminated, truncated, _ = env.step(rng.integers(env.action_space.n))
            total += reward
            over = terminated or truncated
    return total / episodes


def test_document_is_whole() -> None:
    assert list(files()) == ["grid.py", "grid_agent.py", "grid.yaml", "grid_agent_nnx.py"]
    assert commands() == [
        "",
        "actors.placement=process actors.count=2",
        "agent.name=grid_agent_nnx:GridAgentNNX",
    ]
    # Where the first run lies, whose policy is played.
    assert "tianji eval runs/Grid_grid_agent-GridAgent\n" in DOCUMENT.read_text()
    code = files()["grid.py"] + files()["grid_agent.py"]
    assert sum(bool(line.strip()) for line in code.splitlines()) < MAX_LINES


def tianji(folder: Path, *arguments: str) -> str:
    """What the command prints when it is given in the folder of those files."""
    process = subprocess.run(
        [sys.executable, "-m", "tianji_jax.cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize("command", commands(), ids=["linen", "linen in processes", "nnx"])
def test_document_learns(command: str, tmp_path: Path) -> None:
    for name, text in files().items():
        (tmp_path / name).write_text(text)
    # The command as it stands there, but for a run folder and compiled programs that are this test's own.
    own = [f"run.directory={tmp_path}", "run.name=run", "run.compilation_cache=null", "run.report_every_seconds=0.2"]
    printed = tianji(tmp_path, "train", "grid.yaml", *command.split(), *own)
    reports = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    reached, random = reports[-1]["episode_return"], random_return(tmp_path / "grid.py")
    assert random < -1
    assert reached > 0.5
    assert f"solved: return {reached:,.1f} after" in printed
    # Figures of so small returns are shown to one decimal.
    played = dict(re.findall(r"(sampled|greedy)\W+([-\d.]+) \(", tianji(tmp_path, "eval", "run")))
    assert float(played["sampled"]) > 0
    assert float(played["greedy"]) > 0
