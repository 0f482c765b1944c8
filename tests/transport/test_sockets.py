"""Addresses: where one may listen, and what is left behind."""

import stat
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from tianji_jax.transport import local_address
from tianji_jax.transport.sockets import IPC_PATH_LIMIT, bind, open_socket


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "tcp://localhost:*", "tcp://127.0.0.2:*"])
def test_loopback_is_allowed_and_tells_its_port(address: str, context: zmq.Context) -> None:
    with closing(open_socket(context, zmq.ROUTER, 1000)) as socket:
        endpoint = bind(socket, address)
        assert int(endpoint.rpartition(":")[2]) > 0


def test_beyond_loopback_plaintext_must_be_allowed(context: zmq.Context) -> None:
    with closing(open_socket(context, zmq.ROUTER, 1000)) as socket:
        assert bind(socket, "tcp://0.0.0.0:*", allow_plaintext=True).startswith("tcp://0.0.0.0:")


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "192.168.0.7", "example.org", "[::]", "eth0", ""])
def test_beyond_loopback_is_refused(host: str, context: zmq.Context) -> None:
    with closing(open_socket(context, zmq.ROUTER, 1000)) as socket, pytest.raises(ValueError, match="keys"):
        bind(socket, f"tcp://{host}:5555")


@pytest.mark.parametrize("address", ["udp://127.0.0.1:5555", "127.0.0.1:5555", ""])
def test_other_kinds_are_refused(address: str, context: zmq.Context) -> None:
    with (
        closing(open_socket(context, zmq.ROUTER, 1000)) as socket,
        pytest.raises(ValueError, match="inproc://, ipc://"),
    ):
        bind(socket, address)


def test_an_ipc_address_is_private_and_cleaned_up(context: zmq.Context) -> None:
    with local_address("ipc") as address:
        path = Path(address.removeprefix("ipc://"))
        assert len(bytes(path)) <= IPC_PATH_LIMIT
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        with closing(open_socket(context, zmq.ROUTER, 1000)) as socket:
            assert bind(socket, address) == address
            assert path.is_socket()
    assert not path.parent.exists()


def test_a_temporary_directory_too_deep_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ValueError, match="TMPDIR"), local_address("ipc"):
        pass
    assert list(deep.iterdir()) == []


def test_addresses_differ_and_kinds_are_checked() -> None:
    with local_address("inproc") as first, local_address("inproc") as second:
        assert first != second
    with pytest.raises(ValueError, match="'tcp'; inproc or ipc"), local_address("tcp"):
        pass


def test_a_frame_beyond_the_limit_does_not_get_in(context: zmq.Context) -> None:
    with closing(open_socket(context, zmq.ROUTER, 1000)) as server, closing(context.socket(zmq.DEALER)) as peer:
        endpoint = bind(server, "tcp://127.0.0.1:*")
        peer.linger = 0
        peer.connect(endpoint)
        peer.send(b"x" * 1001)
        assert server.poll(300) == 0
        peer.send(b"x" * 1000)
        assert server.poll(5000) != 0
