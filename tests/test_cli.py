"""The command line as a user meets it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tianji_jax import keeper
from tianji_jax.cli import _parse, main
from tianji_jax.commands import configured, learner
from tianji_jax.config import Config

CARTPOLE = str(Path(__file__).parents[1] / "configs" / "cartpole_ppo.yaml")


def test_config_prints_every_setting_resolved(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", CARTPOLE, "agent.learning_rate=1e-3"]) == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    assert tree["agent"]["learning_rate"] == 1e-3
    sections = {
        "run",
        "environment",
        "actors",
        "staleness",
        "balance",
        "replay",
        "learner",
        "groups",
        "checkpoint",
        "metrics",
        "security",
        "agent",
    }
    assert sections == set(tree)
    assert "clip_epsilon" in tree["agent"]


def test_environments_lists_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["environments", "cartpole-v1"]) == 0
    assert {"envpool:CartPole-v1", "gymnasium:CartPole-v1"} <= set(capsys.readouterr().out.split())
    assert main(["environments", "no such game"]) == 1


def test_a_bad_configuration_is_refused_with_code_2_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", CARTPOLE, f"run.directory={tmp_path / 'runs'}", "actors.cout=3"]) == 2
    assert "did you mean 'count'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_name_that_is_taken_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    assert main(["train", CARTPOLE, f"run.directory={tmp_path}", "run.name=mine"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["train", CARTPOLE, f"run.directory={tmp_path / 'file'}"]) == 2
    assert "run.directory" in capsys.readouterr().err


def test_a_run_in_a_pipe_prints_lines_and_a_result(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tianji_jax.cli", "train", CARTPOLE]
    command += [f"run.directory={tmp_path}", "run.environment_steps=20000", "run.name=a"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert "ppo on envpool:CartPole-v1" in lines[0]
    assert "environment steps" in lines[-1]
    assert "\x1b" not in done.stdout
    report = json.loads((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()[-1])
    assert report["environment_steps"] >= 20000


def test_overrides_may_stand_before_and_after_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--connect", "tcp://127.0.0.1:5555", "agent.learning_rate=fast", f"run.directory={tmp_path}"]
    assert main(["actor", CARTPOLE, "run.seed=1", *given]) == 2
    assert "agent.learning_rate: got 'fast'" in capsys.readouterr().err
    for wrong in ("--conect=tcp://127.0.0.1:5555", "seed"):
        with pytest.raises(SystemExit):
            main(["actor", CARTPOLE, *given, wrong])
        assert "unrecognized arguments" in capsys.readouterr().err


def test_the_process_of_a_learner_is_given_every_override_of_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Keeper:
        def __init__(self, place: keeper.Place, config: Config, start: Callable[[], object]) -> None:
            self.config, self.run = config, start

    (tmp_path / "config.yaml").write_text(Path(CARTPOLE).read_text())
    monkeypatch.setattr(keeper, "Child", lambda place, arguments: arguments)
    monkeypatch.setattr(keeper, "Keeper", Keeper)
    place = ["--coordinator", "127.0.0.1:9000", "--process", "0/1"]
    options = _parse(["learner", *place, "--resume", str(tmp_path), "run.seed=7", "agent.discount=0.9"])
    given: Any = learner(options)
    child = configured(_parse(["learner", *given]))
    assert (child.run.seed, child.agent["discount"]) == (7, 0.9)


def test_nothing_is_compiled_anew_for_another_seed(tmp_path: Path) -> None:
    """A program that held the seed as a constant would cost every new seed what compiling costs."""
    cache = tmp_path / "cache"
    small = ["run.environment_steps=200", "actors.environments=4", "actors.unroll_length=8", "agent.minibatches=1"]
    common = ["train", CARTPOLE, *small, f"run.directory={tmp_path}", f"run.compilation_cache={cache}"]
    found = []
    for seed in (1, 2):
        own = [f"run.seed={seed}", f"run.name=seed{seed}"]
        subprocess.run([sys.executable, "-m", "tianji_jax.cli", *common, *own], check=True, capture_output=True)
        found.append({path.name for path in cache.iterdir() if not path.name.endswith("atime")})
    assert len(found[0]) > 3
    assert found[1] == found[0]
