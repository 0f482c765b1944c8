"""Keys: who gets in with them, and what is refused without."""

import contextlib
import functools
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest
import zmq

from short_runs import counting_config, free_ports, train
from tianji_jax.blueprint import Addresses, client_keys, connect, make_actor, plan
from tianji_jax.config import Config, ConfigError, to_yaml
from tianji_jax.transport import (
    Authenticator,
    ClientKeys,
    Outside,
    Refused,
    ServerKeys,
    TrajectoryClient,
    TrajectoryServer,
    load_client_keys,
    load_server_keys,
    local_address,
    make_keys,
)
from tianji_jax.worker import Workers


def assert_no_more_threads_than(before: set[threading.Thread]) -> None:
    """Libraries' own threads, such as the one that feeds TensorBoard's files, end a moment after a run."""
    deadline = time.monotonic() + 5
    while left := set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@contextlib.contextmanager
def guarded(config: Config, keys: ServerKeys) -> Iterator[tuple[TrajectoryServer, Addresses]]:
    """A server with keys that is not polled unless the test does; its authenticator runs."""
    addresses = Addresses.at(f"tcp://127.0.0.1:{free_ports()}")
    outside = Outside(addresses.trajectories, keys, False, range(1, 100))
    context, workers = zmq.Context(), Workers()
    with local_address("inproc") as local:
        authenticator = Authenticator(keys.clients, context)
        server = TrajectoryServer(local, plan(config).trajectory_codec(), context, outside)
        workers.start("authenticator", authenticator.run)
        try:
            yield server, addresses
        finally:
            assert workers.close(5) == []
            workers.check()
            server.close()
            authenticator.close()
            context.term()


@pytest.mark.parametrize("fault", ["no keys", "a stranger's key", "another learner"])
def test_who_has_not_the_right_keys_gets_nothing_and_sends_nothing(
    fault: str, keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = counting_config(tmp_path)
    right = load_client_keys(keys)
    make_keys(tmp_path / "other")
    other = load_client_keys(tmp_path / "other")
    wrong: ClientKeys | None = None
    if fault == "a stranger's key":
        wrong = ClientKeys(other.public, other.secret, right.server)
    elif fault == "another learner":
        wrong = ClientKeys(right.public, right.secret, other.server)
    with guarded(config, load_server_keys(keys)) as (server, addresses):
        codec, context = plan(config).trajectory_codec(), zmq.Context()
        client = TrajectoryClient(addresses.trajectories, 1, codec, context, wrong)
        with pytest.raises(TimeoutError, match=r"within 1 s: .*keys \(security\.keys"):
            client.hello(threading.Event(), 1)
        assert server.poll(0.2) == []
        client.close()
        client = TrajectoryClient(addresses.trajectories, 1, codec, context, right)
        with contextlib.closing(client):
            joined = threading.Thread(target=client.hello, args=(threading.Event(), 10))
            joined.start()
            events = []
            while joined.is_alive():
                events += server.poll(0.05)
            assert [event.actor_id for event in events] == [1]
        context.term()
    assert ("127.0.0.1 is not let in" in caplog.text) == (fault == "a stranger's key")


def act_from_outside(config: Config, actor_id: int, sent: list[int], stop: threading.Event) -> None:
    """What an actor on another host does; notes its id for each trajectory it sends."""
    blueprint, context = plan(config), zmq.Context()
    try:
        assert config.actors.listen is not None
        trajectories, parameters = connect(blueprint, actor_id, Addresses.at(config.actors.listen), context)
        send = trajectories.send
        with mock.patch.object(trajectories, "send", lambda *message: [send(*message), sent.append(actor_id)]):
            make_actor(blueprint, actor_id, jax.devices()[0]).run(trajectories, parameters, stop)
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("secured", [True, False], ids=["keys", "plaintext"])
def test_actors_from_outside_take_part_in_a_run(secured: bool, keys: Path, tmp_path: Path) -> None:
    config = counting_config(
        tmp_path,
        {
            "run": {"environment_steps": 10_000},
            "environment": {"options": {"episode_length": 5, "step_seconds": 1e-3}},
            "actors": {"listen": f"tcp://127.0.0.1:{free_ports()}"},
            "security": {"keys": str(keys) if secured else None},
            "learner": {"trajectories_per_update": 3},
        },
    )
    threads, workers, sent = set(threading.enumerate()), Workers(), list[int]()
    for actor_id in (1, 2):
        workers.start(f"actor {actor_id}", functools.partial(act_from_outside, config, actor_id, sent))
    result, reports = train(config)
    assert workers.close(10) == []
    workers.check()
    assert_no_more_threads_than(threads)
    assert result.environment_steps >= 10_000
    assert reports[-1]["trajectories_rejected"] == 0
    assert sent.count(1) > 50
    assert sent.count(2) > 50


def test_an_actor_gets_in_once_its_key_is_there_and_not_without(
    keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the learner runs; a file that holds no key changes nothing."""
    monkeypatch.setattr("tianji_jax.transport.keys.LOOK_SECONDS", 0.1)
    new = tmp_path / "new"
    make_keys(new)  # of another learner; the pair of its actor will do
    (new / "learner.key").write_bytes((keys / "learner.key").read_bytes())
    config = counting_config(
        tmp_path,
        {
            "run": {"environment_steps": 20_000, "name": "r"},
            "environment": {"options": {"step_seconds": 1e-3}},
            "actors": {"listen": f"tcp://127.0.0.1:{free_ports()}"},
            "security": {"keys": str(keys)},
        },
    )
    theirs = config.model_copy(update={"security": config.security.model_copy(update={"keys": new})})
    run, workers, sent = threading.Thread(target=train, args=(config,)), Workers(), list[int]()
    run.start()
    while not (tmp_path / "r").exists():
        time.sleep(0.05)
    workers.start("actor", functools.partial(act_from_outside, theirs, 7, sent))
    time.sleep(1)
    assert not sent
    (keys / "broken.key").write_text("no key")
    (keys / "seventh.key").write_bytes((new / "actor.key").read_bytes())
    time.sleep(1)
    assert not sent  # as long as one of the files is broken
    (keys / "broken.key").unlink()
    run.join()
    assert workers.close(10) == []
    workers.check()
    assert len(sent) > 10
    assert caplog.text.count("the keys from before stay in use") == 1


def hand_out(source: Path, folder: Path, *names: str) -> Path:
    """A folder of another host, with what `tianji keys new` says should go there."""
    folder.mkdir(mode=0o700)
    for name in names:
        shutil.copy2(source / name, folder)
    return folder


def test_processes_with_keys_find_each_other_and_a_stranger_is_told_what_may_be_wrong(
    keys: Path, tmp_path: Path
) -> None:
    make_keys(tmp_path / "other")
    folders = {
        "train": hand_out(keys, tmp_path / "learner", "learner.key_secret", "actor.key"),
        "actor": hand_out(keys, tmp_path / "host", "learner.key", "actor.key_secret"),
        "stranger": hand_out(tmp_path / "other", tmp_path / "stranger", "actor.key_secret"),
    }
    shutil.copy2(keys / "learner.key", folders["stranger"])
    listen = f"tcp://127.0.0.1:{free_ports()}"
    endless = {"run": {"environment_steps": 10**9}, "actors": {"count": 0, "listen": listen}}
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(counting_config(tmp_path / "runs", endless)))
    logs = {who: tmp_path / f"{who}.log" for who in folders}
    with contextlib.ExitStack() as processes:
        for who, folder in folders.items():
            command = [sys.executable, "-m", "tianji_jax.cli", "train" if who == "train" else "actor", str(path)]
            command += [f"security.keys={folder}", *([] if who == "train" else ["--connect", listen])]
            log = processes.enter_context(logs[who].open("w"))
            process = subprocess.Popen(command, stdout=log, stderr=log)
            processes.callback(process.wait)
            processes.callback(process.kill)
        until_says(logs["actor"], f"connected to {listen}")
        until_says(logs["stranger"], "it does not have the same keys (security.keys of both sides)")
        until_says(logs["train"], "127.0.0.1 is not let in")
        until_says(next((tmp_path / "runs").glob("*/metrics.jsonl")), '"learner/loss"')
        assert "connected to" not in logs["stranger"].read_text()


def until_says(path: Path, words: str) -> None:
    deadline = time.monotonic() + 90
    while words not in path.read_text():
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"actors": {"unroll_length": 16}}, "actors.unroll_length: 16 where the learner has 5"),
        ({"actors": {"environments": 2}}, "actors.environments: 2 where the learner has 4"),
        (
            {"environment": {"options": {"episode_length": 7}}},
            "environment.options.episode_length: 7 where the learner has 5",
        ),
        (
            {"environment": {"name": "gymnasium:CartPole-v1", "options": {}}},
            'environment.name: "gymnasium:CartPole-v1" where the learner has "tianji_jax.testing:CountingEnv"',
        ),
        ({"agent": {"learning_rate": 0.5}}, "agent.learning_rate: 0.5 where the learner has 0.01"),
        ({"agent": {"name": "impala"}}, 'agent.name: "impala" where the learner has "tianji_jax.testing:TrivialAgent"'),
        ({"run": {"deterministic": True}}, "run.deterministic: true where the learner has false"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_actor_that_does_not_fit_is_told_each_setting(theirs: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = counting_config(tmp_path)
    other = counting_config(tmp_path, theirs)
    addresses = Addresses.at(f"tcp://127.0.0.1:{free_ports()}")
    context = zmq.Context()
    outside = Outside(addresses.trajectories, None, False, range(1, 100))
    server = TrajectoryServer("inproc://fit", plan(config).trajectory_codec(), context, outside)
    trajectories, parameters = connect(plan(other), 1, addresses, context)
    refused: list[str] = []

    def hello() -> None:
        try:
            trajectories.hello(threading.Event(), 10)
        except Refused as error:
            refused.append(str(error))

    thread = threading.Thread(target=hello)
    thread.start()
    while thread.is_alive():
        server.poll(0.05)
    for end in (server, trajectories, parameters):
        end.close()
    context.term()
    assert message in refused[0]
    assert refused[0].isprintable()


def test_an_id_of_the_learners_own_is_refused_from_outside(keys: Path, tmp_path: Path) -> None:
    config = counting_config(tmp_path, {"security": {"keys": str(keys)}})
    with guarded(config, load_server_keys(keys)) as (server, addresses):
        context = zmq.Context()
        trajectories, parameters = connect(plan(config), 0, addresses, context)
        polling = threading.Event()
        thread = threading.Thread(target=lambda: [server.poll(0.05) for _ in iter(polling.is_set, True)])
        thread.start()
        with pytest.raises(Refused, match="actor id 0 may not come from there; from outside 1 to 99 may"):
            trajectories.hello(threading.Event(), 10)
        polling.set()
        thread.join()
        trajectories.close()
        parameters.close()
        context.term()


def test_listening_to_strangers_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for address in ("tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://[::]:5555", "tcp://host:5555"):
        config = counting_config(tmp_path / "runs", {"actors": {"listen": address}})
        with pytest.raises(ConfigError, match=r"actors\.listen: .*`tianji keys new DIR`.*security\.allow_plaintext"):
            train(config)
    assert not (tmp_path / "runs").exists()
    plan(counting_config(tmp_path, {"actors": {"listen": "tcp://0.0.0.0:5555"}, "security": {"allow_plaintext": True}}))


def test_sending_to_strangers_is_refused(tmp_path: Path) -> None:
    config = counting_config(tmp_path)
    with pytest.raises(ConfigError, match=r"tcp://10\.0\.0\.1:5555 is beyond this host.*keys"):
        client_keys(config, Addresses.at("tcp://10.0.0.1:5555"))
    assert client_keys(config, Addresses.at("tcp://127.0.0.1:5555")) is None


def test_keys_that_cannot_be_used_are_refused_before_anything_starts(keys: Path, tmp_path: Path) -> None:
    (keys / "learner.key_secret").chmod(0o644)
    settings = {"actors": {"listen": "tcp://127.0.0.1:5555"}, "security": {"keys": str(keys)}}
    with pytest.raises(ConfigError, match=r"security\.keys: .*chmod 600"):
        train(counting_config(tmp_path / "runs", settings))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("which", [0, 1])
def test_a_port_that_is_taken_is_said(which: int, tmp_path: Path) -> None:
    port = free_ports()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + which))
        taken.listen()
        config = counting_config(tmp_path, {"actors": {"listen": f"tcp://127.0.0.1:{port}"}})
        threads = set(threading.enumerate())
        with pytest.raises(ConfigError, match=rf"actors\.listen: cannot listen at .*{port}.*in use"):
            train(config)
        assert_no_more_threads_than(threads)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:5555", "tcp://127.0.0.1:*", "tcp://127.0.0.1:65535", "tcp://:5", "ipc://x"]
)
def test_addresses_that_will_not_do_are_refused(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"actors\.listen: got .*tcp://HOST:PORT"):
        counting_config(tmp_path, {"actors": {"listen": address}})


def test_what_is_sent_with_keys_cannot_be_read(keys: Path, tmp_path: Path) -> None:
    """Somebody in the middle sees neither the settings of the handshake nor the ids."""
    config = counting_config(tmp_path, {"security": {"keys": str(keys)}})
    seen = bytearray()
    with guarded(config, load_server_keys(keys)) as (server, addresses), tapped(addresses, seen) as tap:
        context = zmq.Context()
        trajectories, parameters = connect(plan(config), 1, tap, context)
        thread = threading.Thread(target=trajectories.hello, args=(threading.Event(), 10))
        thread.start()
        while thread.is_alive():
            server.poll(0.05)
        trajectories.close()
        parameters.close()
        context.term()
    assert len(seen) > 500
    assert b"CURVE" in seen
    assert b"CountingEnv" not in seen


@contextlib.contextmanager
def tapped(addresses: Addresses, seen: bytearray) -> Iterator[Addresses]:
    """Addresses whose traffic goes through a listener in the middle that keeps what the client says."""
    port = int(addresses.trajectories.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends: list[socket.socket] = []

        def copy(source: socket.socket, target: socket.socket, keep: bool) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    if keep:
                        seen.extend(data)
                    target.sendall(data)

        def accept() -> None:
            with contextlib.suppress(OSError):
                client, _ = server.accept()
                upstream = socket.create_connection(("127.0.0.1", port))
                ends.extend([client, upstream])
                for arguments in ((client, upstream, True), (upstream, client, False)):
                    threads.append(threading.Thread(target=copy, args=arguments))
                    threads[-1].start()

        threads = [threading.Thread(target=accept)]
        threads[0].start()
        try:
            yield Addresses.at(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        finally:
            time.sleep(0.1)
            for end in ends:
                end.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(5)
            for end in ends:
                end.close()
