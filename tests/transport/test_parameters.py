"""Parameters: the newest, once, to everybody who asks, across restarts; or exactly the version asked for."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from proxy import Proxy
from streams import eventually

from tianji_jax.transport import Codec, ParameterClient, ParameterServer, Rejected, VersionGone
from tianji_jax.types import ArraySpec

SIZE = 40_000  # large enough to be sent without a copy
CODEC = Codec(
    {"kernel": ArraySpec((SIZE,), np.dtype(np.float32)), "bias": ArraySpec((), np.dtype(np.float32))}, {"run": "run"}
)
NEVER = threading.Event()


def params(version: int) -> dict[str, np.ndarray]:
    return {"kernel": np.full(SIZE, version, np.float32), "bias": np.array(-version, np.float32)}


def assert_version(received: tuple[int, Any] | None, version: int) -> None:
    assert received is not None
    assert received[0] == version
    assert (received[1]["kernel"] == version).all()
    assert received[1]["bias"] == -version


@contextmanager
def serving(address: str, context: zmq.Context, keep: int = 1, codec: Codec = CODEC) -> Iterator[ParameterServer]:
    stop = threading.Event()
    server = eventually(lambda: ParameterServer(address, codec, context, keep))
    thread = threading.Thread(target=server.serve, args=(stop,))
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        thread.join(5)
        assert not thread.is_alive()
        server.close()


def test_a_late_joiner_gets_the_current_version_at_once(address: str, context: zmq.Context) -> None:
    with serving(address, context) as server:
        for version in (0, 1, 5):
            server.publish(version, params(version))
        with closing(ParameterClient(server.endpoint, CODEC, context)) as client:
            assert_version(client.newest(0, NEVER, 5), 5)


def test_a_client_that_came_first_waits(address: str, context: zmq.Context) -> None:
    with serving(address, context) as server, closing(ParameterClient(server.endpoint, CODEC, context)) as client:
        threading.Timer(0.3, server.publish, (2, params(2))).start()
        began = time.monotonic()
        assert_version(client.newest(0, NEVER, 5), 2)
        assert 0.2 < time.monotonic() - began < 3


def test_a_client_that_missed_versions_gets_the_last(address: str, context: zmq.Context) -> None:
    with serving(address, context) as server, closing(ParameterClient(server.endpoint, CODEC, context)) as client:
        server.publish(0, params(0))
        assert_version(client.newest(0, NEVER, 5), 0)
        for version in range(1, 5):
            server.publish(version, params(version))
        assert_version(client.newest(4, NEVER, 5), 4)


def test_the_next_version_is_there_before_it_is_asked_for(address: str, context: zmq.Context) -> None:
    with serving(address, context) as server, closing(ParameterClient(server.endpoint, CODEC, context)) as client:
        server.publish(0, params(0))
        assert_version(client.newest(0, NEVER, 5), 0)
        server.publish(1, params(1))
        time.sleep(0.5)
        assert_version(client.newest(1, NEVER, 0), 1)  # no time to wait, none needed


def test_polling_during_an_unroll_keeps_the_newest(address: str, context: zmq.Context) -> None:
    with serving(address, context) as server, closing(ParameterClient(server.endpoint, CODEC, context)) as client:
        server.publish(0, params(0))
        client.newest(0, NEVER, 5)
        for version in range(1, 6):
            server.publish(version, params(version))
            time.sleep(0.1)
            client.poll()
        time.sleep(0.3)
        assert_version(client.newest(0, NEVER, 0), 5)


def test_without_news_the_same_version_is_returned_at_once(address: str, context: zmq.Context) -> None:
    with serving(address, context) as server, closing(ParameterClient(server.endpoint, CODEC, context)) as client:
        server.publish(3, params(3))
        client.newest(0, NEVER, 5)
        assert_version(client.newest(3, NEVER, 0), 3)


def test_received_parameters_are_read_only(address: str, context: zmq.Context) -> None:
    with serving(address, context) as server, closing(ParameterClient(server.endpoint, CODEC, context)) as client:
        server.publish(0, params(0))
        received = client.newest(0, NEVER, 5)
        assert received is not None
        with pytest.raises(ValueError, match="read-only"):
            received[1]["kernel"][0] = 1


def test_waiting_ends_when_stopped_and_when_time_is_up(address: str, context: zmq.Context) -> None:
    with serving(address, context) as server, closing(ParameterClient(server.endpoint, CODEC, context)) as client:
        with pytest.raises(TimeoutError, match=rf"version 4 from {server.endpoint.partition(':')[0]}://.* within 0\.2"):
            client.newest(4, NEVER, 0.2)
        stop = threading.Event()
        threading.Timer(0.2, stop.set).start()
        began = time.monotonic()
        assert client.newest(4, stop, 30) is None
        assert time.monotonic() - began < 2


def test_exact_versions_come_in_lock_step(address: str, context: zmq.Context) -> None:
    with (
        serving(address, context, keep=3) as server,
        closing(ParameterClient(server.endpoint, CODEC, context, exact=True)) as client,
    ):
        for version in range(3):
            server.publish(version, params(version))
        for version in (0, 0, 1, 2, 2):
            assert_version(client.exactly(version, NEVER, 5), version)
        threading.Timer(0.2, server.publish, (3, params(3))).start()
        assert_version(client.exactly(3, NEVER, 5), 3)
        with pytest.raises(TimeoutError):
            client.exactly(4, NEVER, 0.2)
        server.publish(4, params(4))
        assert_version(client.exactly(4, NEVER, 5), 4)


def test_an_exact_version_held_is_not_lost_when_the_next_comes(address: str, context: zmq.Context) -> None:
    with (
        serving(address, context) as server,
        closing(ParameterClient(server.endpoint, CODEC, context, exact=True)) as client,
    ):
        server.publish(0, params(0))
        assert_version(client.exactly(0, NEVER, 5), 0)
        server.publish(1, params(1))
        time.sleep(0.3)
        assert_version(client.exactly(0, NEVER, 0), 0)
        assert_version(client.exactly(1, NEVER, 0), 1)


def test_an_exact_version_no_longer_kept_is_an_error(address: str, context: zmq.Context) -> None:
    with (
        serving(address, context, keep=2) as server,
        closing(ParameterClient(server.endpoint, CODEC, context, exact=True)) as client,
    ):
        for version in range(6):
            server.publish(version, params(version))
        with pytest.raises(VersionGone, match="version 3, but 5"):
            client.exactly(3, NEVER, 5)
        assert_version(client.exactly(4, NEVER, 5), 4)


def test_each_mode_has_its_method(context: zmq.Context) -> None:
    with (
        closing(ParameterClient("inproc://mode", CODEC, context, exact=True)) as client,
        pytest.raises(RuntimeError, match="exactly"),
    ):
        client.newest(0, NEVER, 0)
    with (
        closing(ParameterClient("inproc://mode", CODEC, context)) as client,
        pytest.raises(RuntimeError, match="newest"),
    ):
        client.exactly(0, NEVER, 0)


def test_a_restarted_learner_goes_on_serving(host_address: str, context: zmq.Context) -> None:
    with serving(host_address, context) as server:
        endpoint = server.endpoint
        server.publish(7, params(7))
        client = ParameterClient(endpoint, CODEC, context)
        assert_version(client.newest(0, NEVER, 5), 7)
    with closing(client), serving(endpoint, context) as server:
        server.publish(8, params(8))
        assert_version(client.newest(8, NEVER, 10), 8)


def test_a_learner_restarted_with_a_lower_version_is_followed_after_refetch(
    host_address: str, context: zmq.Context
) -> None:
    with serving(host_address, context) as server:
        endpoint = server.endpoint
        server.publish(7, params(7))
        client = ParameterClient(endpoint, CODEC, context)
        assert_version(client.newest(0, NEVER, 5), 7)
    with closing(client), serving(endpoint, context) as server:
        server.publish(2, params(2))
        assert_version(client.newest(2, NEVER, 5), 7)
        client.refetch()
        assert_version(client.newest(2, NEVER, 10), 2)


def test_parameters_travel_rounded_in_half_the_bytes(context: zmq.Context) -> None:
    narrow = Codec(CODEC.spec, {"run": "run"}, narrow=True)
    assert narrow.fingerprint != CODEC.fingerprint
    sent = {"kernel": np.linspace(-3, 3, SIZE, dtype=np.float32), "bias": np.array(1.5, np.float32)}
    sizes = [[memoryview(frame).nbytes for frame in codec.encode({"kind": "x"}, sent)[1:]] for codec in (CODEC, narrow)]
    assert [2 * size for size in sizes[1]] == sizes[0]
    with serving("tcp://127.0.0.1:*", context, codec=narrow) as server:
        server.publish(1, sent)
        with closing(ParameterClient(server.endpoint, narrow, context)) as client:
            received = client.newest(1, NEVER, 10)
    assert received is not None
    assert received[1]["kernel"].dtype == np.float32
    np.testing.assert_allclose(received[1]["kernel"], sent["kernel"], rtol=2**-8)
    assert received[1]["bias"] == 1.5


def test_a_version_lost_with_a_connection_is_asked_for_again(context: zmq.Context) -> None:
    with (
        serving("tcp://127.0.0.1:*", context) as server,
        Proxy(server.endpoint) as proxy,
        closing(ParameterClient(proxy.endpoint, CODEC, context)) as client,
    ):
        server.publish(0, params(0))
        assert_version(client.newest(0, NEVER, 5), 0)
        time.sleep(0.2)  # the request for the next one gets through
        proxy.swallow = True
        server.publish(1, params(1))
        while proxy.swallowed < SIZE * 4:
            time.sleep(0.01)
        proxy.cut()
        assert_version(client.newest(1, NEVER, 10), 1)


def test_answered_requests_are_not_answered_twice(context: zmq.Context) -> None:
    """A repeat on the same connection brings no second copy: one version at most is under way to a client."""
    with serving("tcp://127.0.0.1:*", context) as server, closing(context.socket(zmq.DEALER)) as peer:
        peer.linger, peer.rcvtimeo = 0, 500
        peer.connect(server.endpoint)
        server.publish(0, params(0))
        request = CODEC.encode_header({"kind": "newest", "number": 1, "version": 0})
        peer.send(request)
        peer.recv_multipart()
        peer.send(request)
        with pytest.raises(zmq.Again):
            peer.recv_multipart()
        peer.send(CODEC.encode_header({"kind": "newest", "number": 2, "version": 0}))
        peer.recv_multipart()


def test_noise_gets_no_answer_and_does_no_harm(host_address: str, context: zmq.Context) -> None:
    with serving(host_address, context) as server, closing(context.socket(zmq.DEALER)) as peer:
        peer.linger = 0
        peer.connect(server.endpoint)
        server.publish(0, params(0))
        wrong = {"kind": "newest", "number": -1, "version": 0}
        for frames in ([b""], [b"x"] * 30, [CODEC.encode_header(wrong)], [CODEC.encode_header({"kind": "gossip"})]):
            peer.send_multipart(frames)
        assert peer.poll(300) == 0
        with closing(ParameterClient(server.endpoint, CODEC, context)) as client:
            assert_version(client.newest(0, NEVER, 5), 0)


def test_parameters_of_another_run_are_rejected(context: zmq.Context) -> None:
    other = Codec(CODEC.spec, {"run": "another"})
    with serving("inproc://other", context, codec=other) as server:
        server.publish(0, params(0))
        with (
            closing(ParameterClient(server.endpoint, CODEC, context)) as client,
            pytest.raises(Rejected, match="fingerprint"),
        ):
            client.newest(0, NEVER, 5)


def test_versions_only_rise(context: zmq.Context) -> None:
    with serving("inproc://rise", context) as server:
        server.publish(3, params(3))
        for version in (3, 2):
            with pytest.raises(ValueError, match=f"version {version} published after 3"):
                server.publish(version, params(version))
    with pytest.raises(ValueError, match="keep is 0"):
        ParameterServer("inproc://rise", CODEC, context, keep=0)


def test_closing_does_not_wait_for_what_is_unsent() -> None:
    context = zmq.Context()
    with serving("tcp://127.0.0.1:*", context) as server:
        peers = [context.socket(zmq.DEALER) for _ in range(3)]
        for peer in peers:  # they ask and never read
            peer.linger = 0
            peer.connect(server.endpoint)
            for number in range(300):
                peer.send(CODEC.encode_header({"kind": "newest", "number": number, "version": 0}))
        server.publish(0, params(0))
        time.sleep(0.3)
        began = time.monotonic()
    for peer in peers:
        peer.close()
    context.term()
    assert time.monotonic() - began < 1


READER = """
import sys, threading
sys.path.insert(0, sys.argv[2])
import zmq
from test_parameters import CODEC, ParameterClient, assert_version
client = ParameterClient(sys.argv[1], CODEC, zmq.Context())
for version in range(20):
    received = client.newest(version, threading.Event(), 30)
    assert received[0] >= version, received[0]
    assert_version(received, received[0])
    print(received[0], flush=True)
"""


def test_another_process_follows(host_address: str, context: zmq.Context) -> None:
    with serving(host_address, context) as server:
        command = [sys.executable, "-c", READER, server.endpoint, str(Path(__file__).parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
            try:
                assert reader.stdout is not None
                server.publish(0, params(0))
                for version in range(1, 20):
                    assert int(reader.stdout.readline()) == version - 1
                    server.publish(version, params(version))
                assert int(reader.stdout.readline()) == 19
                assert reader.wait(10) == 0
            finally:
                reader.kill()
