"""Strangers at an open port, files that others left behind, folders that cannot be written: a run does not mind, or
says so before it starts."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import tianji_jax
from short_runs import counting_config, free_ports, train
from test_train import assert_account_balances
from tianji_jax.cli import main
from tianji_jax.config import ConfigError, to_yaml
from tianji_jax.transport import local_address
from tianji_jax.transport.sockets import LOCK, SWEEP_SECONDS


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_what_killed_processes_left_is_swept_and_what_lives_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = (
        "import os, signal, tempfile; from tianji_jax.transport import local_address\n"
        "with local_address('ipc') as address: print(address, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    left = Path(killed.stdout.strip().removeprefix("ipc://")).parent
    assert left.exists()
    foreign = tmp_path / "tianji-notes"
    foreign.mkdir()
    with local_address("ipc") as address:
        alive = Path(address.removeprefix("ipc://")).parent
        for path in (left, foreign, alive):
            age(path, 2 * SWEEP_SECONDS)
        with local_address("ipc"):
            assert not left.exists()
            assert alive.exists()
            assert foreign.exists()  # without a lock it is none of ours
    assert not alive.exists()
    assert list(tmp_path.iterdir()) == [foreign]


def test_a_directory_that_is_just_being_made_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    young = tmp_path / "tianji-young"
    young.mkdir()
    (young / LOCK).touch()
    with local_address("ipc"):
        assert young.exists()


def test_strangers_at_the_open_port_change_nothing(tmp_path: Path) -> None:
    """One sends noise, one says nothing, one connects again and again, one never reads."""
    port = free_ports()
    config = counting_config(
        tmp_path,
        {
            "run": {"environment_steps": 6000},
            "environment": {"options": {"step_seconds": 1e-3}},
            "actors": {"listen": f"tcp://127.0.0.1:{port}"},
        },
    )
    stop, connected = threading.Event(), []

    def bother(say: bytes, again: bool) -> None:
        while not stop.is_set():
            try:
                with socket.create_connection(("127.0.0.1", port), 1) as stranger:
                    connected.append(say)
                    if say:
                        stranger.sendall(say)
                    while not again and not stop.wait(0.05):
                        pass
            except OSError:
                time.sleep(0.02)

    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00NULL" + bytes(48)
    strangers = [
        threading.Thread(target=bother, args=(os.urandom(100_000), True)),
        threading.Thread(target=bother, args=(b"GET / HTTP/1.1\r\n\r\n", True)),
        threading.Thread(target=bother, args=(b"", False)),
        threading.Thread(target=bother, args=(greeting, False)),
    ]
    for stranger in strangers:
        stranger.start()
    try:
        result, reports = train(config)
    finally:
        stop.set()
        for stranger in strangers:
            stranger.join()
    assert len(set(connected)) == len(strangers)
    assert result.environment_steps >= 6000
    # Noise may look like messages; none of it is a trajectory.
    assert reports[-1]["trajectories_consumed"] * 20 >= 6000
    assert reports[-1]["trajectories_dropped"] == 0
    assert_account_balances(reports)


def test_noise_does_not_abort_the_process_when_sockets_close() -> None:
    """In a process of its own: what would happen otherwise no test could report."""
    port = free_ports()
    code = f"""
import os, socket, threading, time, zmq
from tianji_jax.transport.sockets import bind, open_socket

def bother():
    while True:
        try:
            with socket.create_connection(("127.0.0.1", {port}), 1) as stranger:
                stranger.sendall(os.urandom(1000))
        except OSError:
            time.sleep(0.002)

for _ in range(3):
    threading.Thread(target=bother, daemon=True).start()
context = zmq.Context()
for _ in range(30):
    router = open_socket(context, zmq.ROUTER, 1000)
    bind(router, "tcp://127.0.0.1:{port}")
    end = time.monotonic() + 0.03
    while time.monotonic() < end:
        router.poll(5)
    router.close()
    time.sleep(0.02)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_taken_port_is_found_before_anything_is_written(tmp_path: Path) -> None:
    port = free_ports()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        config = counting_config(tmp_path / "runs", {"actors": {"listen": f"tcp://127.0.0.1:{port}"}})
        with pytest.raises(ConfigError, match=f"cannot listen at tcp://127.0.0.1:{port}"):
            tianji_jax.train(config, show=False)
    assert not (tmp_path / "runs").exists()


def test_a_run_cannot_go_on_with_another_agent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = train(counting_config(tmp_path))[0].path
    assert main(["train", "--resume", str(path), "agent.name=impala"]) == 2
    said = capsys.readouterr().err
    assert "agent.name=impala: this run's agent is tianji_jax.testing:TrivialAgent" in said
    assert len(said.splitlines()) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_can_only_be_read_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], resume: bool
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    config = counting_config(runs)
    path = train(config)[0].path
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    mounted = subprocess.run(["mount", "--bind", "-o", "ro", str(runs), str(runs)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    subprocess.run(["mount", "-o", "remount,ro,bind", str(runs)], check=True)
    try:
        arguments = ["--resume", str(path)] if resume else [str(tmp_path / "c.yaml")]
        assert main(["train", *arguments]) == 2
    finally:
        subprocess.run(["umount", str(runs)], check=True)
    said = capsys.readouterr().err
    assert "Read-only file system" in said
    assert len(said.splitlines()) == 1
