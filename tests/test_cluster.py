"""The files for Slurm, by a real Slurm on this machine (Debian's slurm-wlm and munge, as root).

python -m pytest -m cluster
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from short_runs import counting_config
from tianji_jax.config import to_yaml
from tianji_jax.transport import make_keys

ROOT = Path(__file__).parents[1]
SBATCH = ROOT / "scripts" / "slurm" / "learners.sbatch"

pytestmark = pytest.mark.cluster

CONFIG = """
ClusterName=test
SlurmctldHost={host}
SlurmUser=root
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=requeue_delay=1
MinJobAge=300
JobRequeue=1
KillWait=5
NodeName={host} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Slurm of one node; the environment for its commands."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root, and {', '.join(missing) or 'nothing else'}")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    text = CONFIG.format(host=socket.gethostname(), folder=folder, cpus=os.cpu_count())
    (folder / "slurm.conf").write_text(text)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munge += [f"--pid-file={folder}/munge/pid", f"--log-file={folder}/munge/log", f"--seed-file={folder}/munge/seed"]
    daemons = []
    try:
        for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D"]):
            with (folder / f"{command[0]}.log").open("w") as log:
                daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
            time.sleep(1)
        deadline = time.monotonic() + 30
        while "idle" not in (state := ask(environment, "sinfo", "-h", "-o", "%T")):
            logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
            assert time.monotonic() < deadline, f"{state}\n{logs}"
            time.sleep(0.5)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


def ask(environment: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout.strip()


def submit(slurm: dict[str, str], folder: Path, environment_steps: int) -> str:
    """Two learners on the one node; returns the job's number."""
    config = counting_config(
        folder,
        {
            "run": {"environment_steps": environment_steps},
            "environment": {"options": {"step_seconds": 1e-3}},
            "learner": {"platform": "cpu", "silence_seconds": 6, "gather_seconds": 60},
            "checkpoint": {"every_learner_steps": 20},
        },
    )
    (folder / "c.yaml").write_text(to_yaml(config))
    make_keys(folder / "keys")
    path = os.pathsep.join([str(Path(sys.executable).parent), slurm["PATH"]])
    done = subprocess.run(
        ["sbatch", "--parsable", "--nodes=1", "--ntasks-per-node=2", "--overcommit", str(SBATCH), "c.yaml"],
        cwd=folder,
        env={**slurm, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def reports(folder: Path, job: str) -> list[dict]:
    path = folder / "runs" / f"slurm-{job}" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def until(slurm: dict[str, str], folder: Path, job: str, condition: str) -> None:
    """Wait for the job's state (Slurm's word), or for so many learner steps."""
    deadline = time.monotonic() + 240
    while True:
        state = ask(slurm, "scontrol", "show", "job", job).partition("JobState=")[2].split(" ")[0]
        steps = [report["learner_steps"] for report in reports(folder, job)]
        if state == condition or (condition.isdigit() and steps and steps[-1] >= int(condition)):
            return
        log = folder / f"tianji-{job}.log"
        assert time.monotonic() < deadline, f"{state}: {log.read_text() if log.exists() else ''}"
        time.sleep(0.3)


def test_the_job_trains_with_two_learners_to_its_end(slurm: dict[str, str], tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, 3000)
    until(slurm, tmp_path, job, "COMPLETED")
    assert reports(tmp_path, job)[-1]["environment_steps"] >= 3000
    assert (tmp_path / "runs" / f"slurm-{job}" / "learner-1").is_dir()


def test_a_preempted_job_saves_itself_is_queued_again_and_goes_on(slurm: dict[str, str], tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, 30_000)
    until(slurm, tmp_path, job, "30")
    subprocess.run(["scancel", "--signal=TERM", job], env=slurm, check=True)
    before = reports(tmp_path, job)[-1]["learner_steps"]
    until(slurm, tmp_path, job, str(before + 60))
    log = (tmp_path / f"tianji-{job}.log").read_text()
    assert "stopped; go on with" in log
    assert ask(slurm, "scontrol", "show", "job", job).partition("Restarts=")[2].split(" ")[0] == "1"
    until(slurm, tmp_path, job, "COMPLETED")
    steps = [report["learner_steps"] for report in reports(tmp_path, job)]
    assert steps == sorted(steps)
