"""Peers that keep sending rubbish: cut off, counted, and no burden to the others or to memory."""

import threading
import tracemalloc
from collections import Counter
from contextlib import closing

import numpy as np
import pytest
import zmq
from streams import CODEC, collect, connected, greet, hand_credit, make_codec, make_trajectory
from test_parameters import CODEC as PARAMETER_CODEC
from test_parameters import NEVER, assert_version, params, serving

from tianji_jax.transport import (
    Arrived,
    Credit,
    Joined,
    Lost,
    MessageRejected,
    ParameterClient,
    Refused,
    TrajectoryClient,
    TrajectoryServer,
)
from tianji_jax.transport.peers import ACTOR_LIMIT, ID_LIMIT, REJECTION_LIMIT, Offenders, Peer, Table, actor_identity
from tianji_jax.types import Stamp


def reasons(events: list[object]) -> Counter[str]:
    return Counter(event.reason for event in events if isinstance(event, MessageRejected))


def test_who_keeps_sending_rubbish_is_cut_off_and_the_others_are_not(host_address: str, context: zmq.Context) -> None:
    with connected(host_address, context, 3) as (server, client), closing(context.socket(zmq.DEALER)) as noise:
        noise.linger, noise.routing_id, noise.rcvtimeo = 0, b"noise", 5000
        noise.connect(server.endpoint)
        for _ in range(3 * REJECTION_LIMIT):
            noise.send(b"rubbish")
        events = collect(server, 3 * REJECTION_LIMIT)
        assert reasons(events) == {"malformed": REJECTION_LIMIT, "cut_off": 2 * REJECTION_LIMIT}
        assert b"more were rejected than trajectories taken" in noise.recv()
        assert noise.poll(100) == 0  # told once
        hand_credit(server, client)
        client.send(Stamp(0, 3, 0), make_trajectory(), [], {})
        assert isinstance(collect(server, 1)[0], Arrived)


def test_an_actor_that_is_cut_off_gives_its_credits_back_and_is_told(address: str, context: zmq.Context) -> None:
    with connected(address, context, 3) as (server, client):
        for _ in range(2):
            hand_credit(server, client)
        client.send(Stamp(0, 3, 5), make_trajectory(), [], {})  # a gap: one credit spent, one lost
        assert [type(event) for event in collect(server, 2)] == [Lost, Arrived]
        for _ in range(2):
            hand_credit(server, client)
        for _ in range(REJECTION_LIMIT + 1):  # the one that was taken made up for nothing yet
            client.send(Stamp(0, 3, 0), make_trajectory(), [], {})
        events = collect(server, REJECTION_LIMIT + 2)
        assert reasons(events) == {"replayed": REJECTION_LIMIT, "cut_off": 1}
        assert [event for event in events if isinstance(event, Lost)] == [Lost(3, 2)]
        assert not server.grant(3, Credit(0))
        with pytest.raises(Refused, match="100 messages more were rejected than trajectories taken"):
            client.credit(5)


def test_faults_that_are_outweighed_are_forgiven(context: zmq.Context) -> None:
    """An actor whose environment gives NaN now and then serves the run for ever."""
    with connected("inproc://forgiven", context) as (server, client):
        for sequence in range(3 * REJECTION_LIMIT):
            hand_credit(server, client)
            trajectory = make_trajectory()
            trajectory.reward[0, 0] = np.nan if sequence % 2 else 1
            client.send(Stamp(0, 0, sequence), trajectory, [], {})
            (event,) = collect(server, 1)
            assert isinstance(event, MessageRejected if sequence % 2 else Arrived)


def test_an_actor_whose_every_trajectory_is_rejected_is_cut_off(context: zmq.Context) -> None:
    """Asking for credits makes up for nothing."""
    with connected("inproc://hopeless", context) as (server, client):
        trajectory = make_trajectory()
        trajectory.reward[0, 0] = np.nan
        for sequence in range(REJECTION_LIMIT):
            hand_credit(server, client)
            client.send(Stamp(0, 0, sequence), trajectory, [], {})
            assert reasons(collect(server, 1)) == {"non_finite": 1}
        with pytest.raises(Refused, match=r"the last is non_finite: \.reward"):
            client.credit(5)


def test_an_actor_of_another_run_that_does_not_give_up_is_not_answered_for_ever(context: zmq.Context) -> None:
    other = make_codec(6)
    with (
        closing(TrajectoryServer("inproc://stubborn", CODEC, context)) as server,
        closing(context.socket(zmq.DEALER)) as peer,
    ):
        peer.linger, peer.routing_id = 0, actor_identity(5)
        peer.connect(server.endpoint)
        hello = other.encode_header({"kind": "hello", "received": 0, "sequence": 0, "description": other.description})
        for _ in range(2 * REJECTION_LIMIT):
            peer.send(hello)
        assert reasons(collect(server, 2 * REJECTION_LIMIT)) == {
            "fingerprint": REJECTION_LIMIT,
            "cut_off": REJECTION_LIMIT,
        }
        answers = 0
        while peer.poll(100):
            peer.recv()
            answers += 1
        assert answers == REJECTION_LIMIT


def test_the_later_of_two_actors_of_one_id_stays_and_the_other_is_told(host_address: str, context: zmq.Context) -> None:
    with (
        connected(host_address, context, 4) as (server, first),
        closing(TrajectoryClient(server.endpoint, 4, CODEC, context)) as second,
    ):
        assert greet(server, second) == [Joined(4)]
        first.request()
        assert reasons(collect(server, 1)) == {"replaced": 1}
        with pytest.raises(Refused, match="another actor 4 has said hello since"):
            first.credit(5)
        hand_credit(server, second)


def test_requests_for_parameters_are_limited_alike(context: zmq.Context) -> None:
    with serving("tcp://127.0.0.1:*", context) as server, closing(context.socket(zmq.DEALER)) as noise:
        noise.linger = 0
        noise.connect(server.endpoint)
        for _ in range(3 * REJECTION_LIMIT):
            noise.send(b"rubbish")
        server.publish(0, params(0))
        with closing(ParameterClient(server.endpoint, PARAMETER_CODEC, context)) as client:
            assert_version(client.newest(0, NEVER, 5), 0)
        done = threading.Event()
        while sum(server.rejections.values()) < 3 * REJECTION_LIMIT:
            assert not done.wait(0.01)
        assert server.rejections == {"malformed": REJECTION_LIMIT, "cut_off": 2 * REJECTION_LIMIT}


def test_a_client_that_asks_and_does_not_read_holds_few_versions(context: zmq.Context) -> None:
    """The rest of what it asks for waits on its side."""
    with serving("inproc://greedy", context) as server, closing(context.socket(zmq.DEALER)) as greedy:
        greedy.linger, greedy.rcvhwm = 0, 1
        greedy.connect(server.endpoint)
        server.publish(0, params(0))
        for number in range(50):
            greedy.send(PARAMETER_CODEC.encode_header({"kind": "newest", "number": number, "version": 0}))
        threading.Event().wait(0.3)
        answers = 0
        while greedy.poll(200):
            greedy.recv_multipart()
            answers += 1
        assert 1 <= answers <= 5


def test_invented_identities_take_no_more_memory_than_there_can_be_actors() -> None:
    offenders = Offenders()
    for number in range(ACTOR_LIMIT):
        offenders.reject(Peer(1, b"%d" % number))
    tracemalloc.start()
    try:
        for number in range(ACTOR_LIMIT):
            offenders.reject(Peer(1, b"-%d" % number))
        current, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # These have taken the place of the others, which were not traced: it is the table's whole size.
    assert current < 400 * ACTOR_LIMIT


def test_one_that_is_cut_off_is_not_forgotten_while_it_goes_on() -> None:
    offenders, loud = Offenders(), Peer(1, b"loud")
    assert [offenders.reject(loud) for _ in range(REJECTION_LIMIT)] == [False] * (REJECTION_LIMIT - 1) + [True]
    for number in range(2 * ACTOR_LIMIT):
        offenders.reject(Peer(1, b"%d" % number))
        if number % 1000 == 0:
            assert offenders.cut_off(loud)


def test_a_table_forgets_the_one_set_longest_ago() -> None:
    table = Table[str, int](2)
    table["a"], table["b"] = 1, 2
    table["a"] = 3
    table["c"] = 4
    assert dict(table) == {"a": 3, "c": 4}


@pytest.mark.parametrize(
    ("identity", "actor_id"),
    [
        (actor_identity(0), 0),
        (actor_identity(ID_LIMIT - 1), ID_LIMIT - 1),
        (actor_identity(ID_LIMIT), None),
        (b"5", None),
        (b"5-", None),
        (b"-5-0123456789abcdef", None),
        (b"5-0123456789abcdef\n", None),
        ("\u0665-0123456789abcdef".encode(), None),
        (b"", None),
    ],
)
def test_ids_are_read_from_whole_identities_only(identity: bytes, actor_id: int | None) -> None:
    assert Peer(0, identity).actor_id == actor_id
