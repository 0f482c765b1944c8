"""The stream of trajectories when things go wrong: noise, restarts, broken connections, killed processes."""

import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zmq
from proxy import Proxy
from streams import CODEC, collect, connected, eventually, greet, hand_credit, make_trajectory, until

from tianji_jax.transport import (
    Arrived,
    Credit,
    Joined,
    Lost,
    MessageRejected,
    Requested,
    TrajectoryClient,
    TrajectoryServer,
)
from tianji_jax.transport.peers import actor_identity
from tianji_jax.types import Stamp


def test_noise_is_rejected_and_the_stream_goes_on(host_address: str, context: zmq.Context) -> None:
    with connected(host_address, context) as (server, client), closing(context.socket(zmq.DEALER)) as noise:
        noise.linger = 0
        noise.connect(server.endpoint)
        hello = {"kind": "hello", "received": 0, "sequence": 0}
        for frames in ([b""], [b"x" * 300, b"y"], [b"\x80"] * 50, [CODEC.encode_header(hello)]):
            noise.send_multipart(frames)
        events = collect(server, 4)
        assert [(event.actor_id, event.reason) for event in events] == [(None, "malformed")] * 4
        hand_credit(server, client)
        client.send(Stamp(0, 0, 0), make_trajectory(), [], {})
        assert isinstance(collect(server, 1)[0], Arrived)


@pytest.mark.parametrize(
    "entries",
    [
        {"version": -1},
        {"sequence": "0"},
        {"returns": b"1234567"},
        {"lengths": b""},
        {"seconds": {"environment": "long"}},
        {"seconds": {"environment": float("nan")}},
        {"seconds": None},
        {"received": None},
        {"kind": "gossip"},
    ],
    ids=str,
)
def test_a_wrong_header_is_rejected(entries: dict[str, Any], context: zmq.Context) -> None:
    with (
        closing(TrajectoryServer("inproc://headers", CODEC, context)) as server,
        closing(context.socket(zmq.DEALER)) as peer,
    ):
        peer.linger, peer.routing_id = 0, actor_identity(5)
        peer.connect(server.endpoint)
        always = {"received": 0, "sequence": 0}
        peer.send(CODEC.encode_header({"kind": "hello", "description": "", **always}))
        assert collect(server, 1) == [Joined(5)]
        server.grant(5, Credit(0))
        good = {"kind": "trajectory", "version": 0, "returns": b"12345678", "lengths": bytes(8), "seconds": {}}
        peer.send_multipart(CODEC.encode({**always, **good, **entries}, make_trajectory()))
        (event,) = collect(server, 1)
        assert isinstance(event, MessageRejected)
        assert (event.actor_id, event.reason) == (5, "malformed")


def test_a_peer_of_another_protocol_is_refused(context: zmq.Context) -> None:
    with (
        closing(TrajectoryServer("inproc://protocol", CODEC, context)) as server,
        closing(context.socket(zmq.DEALER)) as peer,
    ):
        peer.linger, peer.routing_id, peer.rcvtimeo = 0, actor_identity(5), 5000
        peer.connect(server.endpoint)
        peer.send(CODEC.encode_header({"kind": "hello", "protocol": 99}))
        assert [event.reason for event in collect(server, 1)] == ["protocol"]
        answer = CODEC.decode_header(peer.recv())
        assert answer["kind"] == "refused"
        assert "99" in answer["message"]


def test_a_restarted_actor_joins_again_and_begins_anew(address: str, context: zmq.Context) -> None:
    with connected(address, context, 4) as (server, old):
        hand_credit(server, old)
        old.send(Stamp(0, 4, 0), make_trajectory(), [], {})
        assert isinstance(collect(server, 1)[0], Arrived)
        hand_credit(server, old)
        with closing(TrajectoryClient(server.endpoint, 4, CODEC, context)) as new:
            assert greet(server, new) == [Joined(4)]
            old.close()
            new.send(Stamp(0, 4, 0), make_trajectory(), [], {})  # the credit of its predecessor is not its own
            assert [event.reason for event in collect(server, 1)] == ["uncredited"]
            hand_credit(server, new)
            new.send(Stamp(0, 4, 1), make_trajectory(), [], {})
            assert isinstance(collect(server, 1)[0], Arrived)


def test_a_restarted_learner_meets_its_actors_again(host_address: str, context: zmq.Context) -> None:
    with closing(TrajectoryServer(host_address, CODEC, context)) as old:
        endpoint = old.endpoint
        client = TrajectoryClient(endpoint, 3, CODEC, context)
        with closing(client):
            greet(old, client)
            hand_credit(old, client)
            client.request()
            assert collect(old, 1) == [Requested(3)]
            old.close()
            credits: list[Credit | None] = []
            waiting = threading.Thread(target=lambda: credits.append(client.credit(10)))
            waiting.start()
            with closing(eventually(lambda: TrajectoryServer(endpoint, CODEC, context))) as new:
                events = collect(new, 3)
                assert isinstance(events[0], MessageRejected)
                assert events[0].reason == "unknown"
                assert [event for event in events if not isinstance(event, MessageRejected)] == [
                    Joined(3),
                    Requested(3),
                ]
                assert new.grant(3, Credit(1))
                assert new.refetch(3)
                waiting.join()
                assert credits == [Credit(1)]
                assert client.credit(0.2) is None
                assert (client.take_refetch(), client.take_refetch()) == (True, False)
                client.send(Stamp(1, 3, 7), make_trajectory(), [], {})
                assert isinstance(collect(new, 1)[-1], Arrived)


def test_a_credit_lost_with_a_connection_is_given_again(context: zmq.Context) -> None:
    with (
        closing(TrajectoryServer("tcp://127.0.0.1:*", CODEC, context)) as server,
        Proxy(server.endpoint) as proxy,
        closing(TrajectoryClient(proxy.endpoint, 0, CODEC, context)) as client,
    ):
        greet(server, client)
        client.request()
        assert collect(server, 1) == [Requested(0)]
        proxy.swallow = True
        assert server.grant(0, Credit(8))
        until(lambda: proxy.swallowed > 0)
        proxy.cut()
        credits: list[Credit | None] = []
        waiting = threading.Thread(target=lambda: credits.append(client.credit(10)))
        waiting.start()
        while waiting.is_alive():
            assert server.poll(0.05) == []
        assert credits == [Credit(8)]
        client.send(Stamp(8, 0, 0), make_trajectory(), [], {})
        assert isinstance(collect(server, 1)[0], Arrived)


def test_an_actor_that_was_away_when_it_was_its_turn_asks_again(context: zmq.Context) -> None:
    with closing(TrajectoryServer("tcp://127.0.0.1:*", CODEC, context)) as server:
        proxy = Proxy(server.endpoint)
        with closing(TrajectoryClient(proxy.endpoint, 0, CODEC, context)) as client:
            with proxy:
                greet(server, client)
                client.request()
                assert collect(server, 1) == [Requested(0)]
            until(lambda: not server.refetch(0))
            assert not server.grant(0, Credit(1))
            with Proxy(server.endpoint, int(proxy.endpoint.rpartition(":")[2])):
                assert client.credit(2) is None
                assert collect(server, 1) == [Requested(0)]
                assert server.grant(0, Credit(2))
                assert client.credit(5) == Credit(2)


def test_a_trajectory_lost_with_a_connection_is_noticed(context: zmq.Context) -> None:
    with (
        closing(TrajectoryServer("tcp://127.0.0.1:*", CODEC, context)) as server,
        Proxy(server.endpoint) as proxy,
        closing(TrajectoryClient(proxy.endpoint, 0, CODEC, context)) as client,
    ):
        greet(server, client)
        for _ in range(2):
            hand_credit(server, client)
        proxy.swallow = True
        client.send(Stamp(0, 0, 0), make_trajectory(), [], {})
        until(lambda: proxy.swallowed > 0)
        proxy.cut()
        client.send(Stamp(0, 0, 1), make_trajectory(), [], {})
        lost, arrived = collect(server, 2)
        assert lost == Lost(0, 1)
        assert arrived.stamp.sequence == 1


def test_closing_does_not_wait_for_what_is_unsent() -> None:
    context = zmq.Context()
    client = TrajectoryClient("tcp://127.0.0.1:9", 0, CODEC, context)
    for sequence in range(10):
        client.send(Stamp(0, 0, sequence), make_trajectory(), [], {})
    began = time.monotonic()
    client.close()
    context.term()
    assert time.monotonic() - began < 1


def test_nothing_is_left_open(host_address: str) -> None:
    def cycle() -> None:
        context = zmq.Context()
        with connected(host_address, context):
            pass
        context.term()

    cycle()  # what is made once per process is made now
    files, threads = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    for _ in range(5):
        cycle()
    assert len(list(Path("/proc/self/fd").iterdir())) <= files
    assert threading.active_count() <= threads


ACTOR = """
import sys, threading
sys.path.insert(0, sys.argv[2])
import zmq
from streams import CODEC, make_trajectory
from tianji_jax.transport import TrajectoryClient
from tianji_jax.types import Stamp
client = TrajectoryClient(sys.argv[1], 6, CODEC, zmq.Context())
client.hello(threading.Event(), 30)
for sequence in range(1000):
    client.request()
    credit = client.credit(30)
    client.send(Stamp(credit.version, 6, sequence), make_trajectory(sequence), [], {})
"""


def test_an_actor_process_that_is_killed_can_be_replaced(host_address: str, context: zmq.Context) -> None:
    with closing(TrajectoryServer(host_address, CODEC, context)) as server:
        command = [sys.executable, "-c", ACTOR, server.endpoint, str(Path(__file__).parent)]
        for _ in range(2):
            with subprocess.Popen(command) as actor:
                try:
                    assert collect(server, 2, 30) == [Joined(6), Requested(6)]
                    for sequence in range(3):
                        assert server.grant(6, Credit(sequence))
                        arrived, requested = collect(server, 2)
                        assert isinstance(arrived, Arrived)
                        assert arrived.stamp == Stamp(sequence, 6, sequence)
                        assert (arrived.trajectory.reward == sequence).all()
                        assert requested == Requested(6)
                finally:
                    actor.kill()
            until(lambda: not server.grant(6, Credit(9)))
