"""What the tests of the trajectory stream share: a spec, a server and a client that meet."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, TypeVar

import jax
import numpy as np
import zmq

from tianji_jax.transport import Codec, Credit, Event, Joined, Requested, TrajectoryClient, TrajectoryServer
from tianji_jax.types import ArraySpec, DiscreteActions, EnvSpec, Trajectory, trajectory_spec

T = TypeVar("T")
ENV = EnvSpec("test", ArraySpec((4,), np.dtype(np.float32)), DiscreteActions(2))


def make_codec(unroll_length: int = 5, run: str = "run") -> Codec:
    extras = {"log_prob": ArraySpec((), np.dtype(np.float32))}
    return Codec(trajectory_spec(ENV, unroll_length, 3, extras, ()), {"run": run})


CODEC = make_codec()


def make_trajectory(value: float = 1.0) -> Trajectory:
    return jax.tree.map(lambda spec: np.full(spec.shape, value).astype(spec.dtype), CODEC.spec)


def collect(server: TrajectoryServer, number: int, timeout: float = 5.0) -> list[Event]:
    """The next `number` events, fewer when they do not come."""
    events: list[Event] = []
    deadline = time.monotonic() + timeout
    while len(events) < number and time.monotonic() < deadline:
        events += server.poll(0.05)
    return events


def silence(server: TrajectoryServer) -> list[Event]:
    """What comes although nothing should."""
    return collect(server, 1, 0.2)


def greet(server: TrajectoryServer, client: TrajectoryClient) -> list[Event]:
    """Let the client say hello while the server is served."""
    failures: list[BaseException] = []

    def hello() -> None:
        try:
            client.hello(threading.Event(), 5)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=hello)
    thread.start()
    events: list[Event] = []
    while thread.is_alive():
        events += server.poll(0.02)
    if failures:
        raise failures[0]
    return events


@contextmanager
def connected(address: str, context: zmq.Context, actor_id: int = 0) -> Iterator[tuple[Any, Any]]:
    """A server and a client that have met."""
    with (
        closing(TrajectoryServer(address, CODEC, context)) as server,
        closing(TrajectoryClient(server.endpoint, actor_id, CODEC, context)) as client,
    ):
        assert greet(server, client) == [Joined(actor_id)]
        yield server, client


def hand_credit(server: TrajectoryServer, client: TrajectoryClient, version: int = 0) -> None:
    client.request()
    (request,) = collect(server, 1)
    assert isinstance(request, Requested)
    assert server.grant(request.actor_id, Credit(version))
    assert client.credit(5) == Credit(version)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def eventually(make: Callable[[], T]) -> T:
    """What `make` returns as soon as the address is free; closed sockets free theirs a moment later."""
    deadline = time.monotonic() + 5
    while True:
        with suppress(zmq.ZMQError):
            return make()
        assert time.monotonic() < deadline
        time.sleep(0.01)
