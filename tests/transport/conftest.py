"""Sockets for the tests of the transport: a context that is checked for leaks, an address of each kind."""

import contextlib
import threading
from collections.abc import Iterator

import pytest
import zmq

from tianji_jax.transport import local_address


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    """A context; a socket the test left open makes its end hang, which the watch turns into a failure."""
    context = zmq.Context()
    yield context
    ended = threading.Thread(target=context.term, daemon=True)
    ended.start()
    ended.join(5)
    assert not ended.is_alive(), "a socket was left open"


@pytest.fixture(params=["inproc", "ipc", "tcp"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """An address to listen at, of each kind."""
    with contextlib.ExitStack() as stack:
        kind = request.param
        yield "tcp://127.0.0.1:*" if kind == "tcp" else stack.enter_context(local_address(kind))


@pytest.fixture(params=["ipc", "tcp"])
def host_address(request: pytest.FixtureRequest) -> Iterator[str]:
    """An address between processes."""
    with contextlib.ExitStack() as stack:
        yield "tcp://127.0.0.1:*" if request.param == "tcp" else stack.enter_context(local_address("ipc"))
