"""scripts/tpu_pod.sh with a `gcloud` that runs commands in a folder for each worker of this machine."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tianji_jax.cli import _parse
from tianji_jax.commands import configured
from tianji_jax.config import load
from tianji_jax.remote_actor import _addresses

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "tpu_pod.sh"
SHELL = [SCRIPT, *(ROOT / "scripts").glob("*/*.sh"), *(ROOT / "scripts").glob("*/*.sbatch")]

GCLOUD = """#!/bin/bash
# gcloud compute tpus tpu-vm COMMAND TPU --zone=ZONE [--worker=WORKER] [--command=WORDS]
[ "$1 $2 $3 $5 $6" = "compute tpus tpu-vm pod --zone=z" ] || exit 9
if [ "$4" = describe ]; then echo '10.0.0.1;10.0.0.2'; exit; fi
for word in "$@"; do
    case $word in --worker=*) workers=${word#*=} ;; --command=*) command=${word#*=} ;; esac
done
[ "$workers" = all ] && workers="0 1"
for worker in $workers; do (cd "$HOSTS/$worker" && bash -c "$command") || exit; done
"""

TIANJI = """#!/bin/bash
# Notes its arguments, and runs until it is told to stop.
python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@" > arguments.part
mv arguments.part arguments
trap 'touch stopped; exit 75' TERM
for _ in $(seq 300); do sleep 0.1; done
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """Folders of two workers; each has a tianji."""
    for path, text in {
        "gcloud": GCLOUD,
        "0/tianji/.venv/bin/tianji": TIANJI,
        "1/tianji/.venv/bin/tianji": TIANJI,
    }.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    return tmp_path


def script(hosts: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PATH": f"{hosts}:{os.environ['PATH']}", "HOSTS": str(hosts)}
    return subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=30)


def started(hosts: Path) -> list[list[str]]:
    """What `tianji` was called with on each worker."""
    files = [hosts / worker / "tianji" / "arguments" for worker in "01"]
    deadline = time.monotonic() + 20
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    found = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return found


def stop(hosts: Path) -> None:
    """Worker 0 by the script; the other would end with it."""
    files = [hosts / worker / "tianji" / "runs" / "r.pid" for worker in "01"]
    processes = [psutil.Process(int(file.read_text())) for file in files]
    assert script(hosts, "--stop", "pod", "z", "r").returncode == 0
    processes[1].terminate()
    for worker, process in zip("01", processes, strict=True):
        process.wait(20)
        (hosts / worker / "tianji" / "stopped").unlink()


def test_learners_start_everywhere_stop_and_go_on(hosts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments = ["pod", "z", "r", "configs/cartpole_ppo.yaml", "agent.network={hidden_sizes: [16]}"]
    done = script(hosts, *arguments)
    assert done.returncode == 0, done.stderr
    first = started(hosts)
    for words in first:
        options = _parse(words)
        config = configured(options)
        assert options.command.__name__ == "learner"
        assert options.resume is options.coordinator is options.process is None
        assert (config.run.directory / config.run.name, config.security.keys) == (Path("runs/r"), Path("keys"))
        assert config.agent["network"]["hidden_sizes"] == [16]
    assert "runs already" in script(hosts, *arguments).stderr
    stop(hosts)

    # Nothing was saved: what is left is out of the way.
    run = hosts / "0" / "tianji" / "runs" / "r"
    (run / "checkpoints" / "7.orbax-checkpoint-tmp").mkdir(parents=True)
    assert script(hosts, *arguments).returncode == 0
    assert started(hosts) == first
    assert not run.exists()
    stop(hosts)

    # Saved, on worker 0 only.
    (run / "checkpoints" / "7").mkdir(parents=True)
    assert script(hosts, *arguments).returncode == 0
    assert started(hosts) == [[*words, "--resume", "runs/r"] for words in first]
    assert _parse([*first[0], "--resume", "runs/r"]).resume == Path("runs/r")
    stop(hosts)


def test_actors_elsewhere_get_their_commands(hosts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = script(
        hosts, "--actors-elsewhere", "pod", "z", "r", "configs/cartpole_ppo.yaml", "agent.entropy_coefficient=0.02"
    )
    config = configured(_parse(started(hosts)[0]))
    stop(hosts)
    assert (config.actors.count, config.actors.listen) == (0, "tcp://0.0.0.0:5555")
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("tianji actor")]
    actors = [_parse(line[1:]) for line in lines]
    assert [_addresses(actor.connect).trajectories for actor in actors] == [
        "tcp://10.0.0.1:5555",
        "tcp://10.0.0.2:5555",
    ]
    assert all(load(actor.config, actor.overrides).agent == config.agent for actor in actors)


def test_a_dry_run_runs_nothing(hosts: Path) -> None:
    for arguments in (["configs/cartpole_ppo.yaml"], ["--actors-elsewhere"], ["--stop"]):
        flags = [word for word in arguments if word.startswith("--")]
        done = script(hosts, "--dry-run", *flags, "pod", "z", "r", *([] if "--stop" in flags else ["c.yaml"]))
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("gcloud compute tpus tpu-vm ssh pod --zone=z --worker=0 ")
    assert not (hosts / "0" / "tianji" / "runs").exists()


@pytest.mark.parametrize("arguments", [[], ["pod", "z"], ["pod", "z", "a b", "c.yaml"], ["--wrong", "pod", "z", "r"]])
def test_what_it_does_not_understand_it_says(hosts: Path, arguments: list[str]) -> None:
    done = script(hosts, *arguments)
    assert done.returncode == 2
    assert "scripts/tpu_pod.sh [--dry-run]" in done.stderr


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shell_scripts_are_clean(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", path], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
