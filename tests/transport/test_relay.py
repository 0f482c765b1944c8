"""A relay fetches parameters once for all actors of a host, from whichever learner there is."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import zmq
from test_parameters import CODEC, NEVER, assert_version, params, serving

from tianji_jax.transport import ParameterClient, ParameterRelay, parameters


@contextmanager
def relaying(upstream: str, context: zmq.Context) -> Iterator[str]:
    """The address of a relay of what `upstream` serves."""
    stop = threading.Event()
    with serving("inproc://relay", context) as server:
        relay = ParameterRelay(ParameterClient(upstream, CODEC, context), server)
        thread = threading.Thread(target=relay.run, args=(stop,))
        thread.start()
        try:
            yield server.endpoint
        finally:
            stop.set()
            thread.join(5)
            assert not thread.is_alive()


def test_a_relay_fetches_once_for_all(context: zmq.Context) -> None:
    with serving("tcp://127.0.0.1:*", context) as server, relaying(server.endpoint, context) as near:
        clients = [ParameterClient(near, CODEC, context) for _ in range(3)]
        try:
            for version in range(1, 20):
                server.publish(version, params(version))
                for client in clients:
                    assert_version(client.newest(version, NEVER, 10), version)
            # One peer has been answered, not three.
            assert len(server._answered) == 1
        finally:
            for client in clients:
                client.close()


def test_a_relay_follows_a_learner_that_begins_anew(
    host_address: str, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameters, "RELAY_SECONDS", 0.3)
    with serving(host_address, context) as server:
        endpoint = server.endpoint
        server.publish(7, params(7))
        relay = relaying(endpoint, context)
        near = relay.__enter__()
        client = ParameterClient(near, CODEC, context)
        assert_version(client.newest(7, NEVER, 10), 7)
    try:
        time.sleep(0.5)  # while there is none
        with closing(client), serving(endpoint, context) as server:
            server.publish(2, params(2))
            deadline = time.monotonic() + 20
            while True:
                client.refetch()
                received = client.newest(0, NEVER, 10)
                assert received is not None
                if received[0] == 2:
                    break
                assert time.monotonic() < deadline
            assert_version(received, 2)
            server.publish(3, params(3))
            assert_version(client.newest(3, NEVER, 10), 3)
    finally:
        relay.__exit__(None, None, None)


def test_who_waits_gets_a_lower_version_after_forgetting_without_asking_again(
    context: zmq.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameters, "REPEAT_SECONDS", 60.0)
    with (
        serving("inproc://server", context) as server,
        closing(ParameterClient(server.endpoint, CODEC, context)) as client,
    ):
        server.publish(9, params(9))
        assert_version(client.newest(9, NEVER, 10), 9)
        server.forget()
        client.refetch()
        for version in (2, 3, 4):
            publishing = threading.Timer(0.2, server.publish, (version, params(version)))
            publishing.start()
            assert_version(client.newest(version, NEVER, 10), version)
            publishing.join()
