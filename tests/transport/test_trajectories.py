"""The stream of trajectories: what arrives, who may send, what is turned away."""

import threading
import time
from contextlib import closing

import jax
import numpy as np
import pytest
import zmq
from streams import CODEC, collect, connected, greet, hand_credit, make_codec, make_trajectory, silence

from tianji_jax.transport import (
    Arrived,
    Credit,
    Joined,
    Lost,
    MessageRejected,
    Refused,
    Requested,
    TrajectoryClient,
    TrajectoryServer,
)
from tianji_jax.transport.trajectory_client import EPISODES_LIMIT, REPEAT_SECONDS
from tianji_jax.types import Episode, Stamp


def test_a_trajectory_arrives_as_it_was_sent(address: str, context: zmq.Context) -> None:
    with connected(address, context, actor_id=7) as (server, client):
        hand_credit(server, client, version=3)
        sent = jax.tree.map(
            lambda spec: np.arange(np.prod(spec.shape)).reshape(spec.shape).astype(spec.dtype), CODEC.spec
        )
        client.send(Stamp(3, 7, 0), sent, [Episode(1.5, 200), Episode(-2.0, 3)], {"environment": 0.25})
        (event,) = collect(server, 1)
        assert isinstance(event, Arrived)
        assert (event.actor_id, event.stamp) == (7, Stamp(3, 7, 0))
        assert event.episodes == [Episode(1.5, 200), Episode(-2.0, 3)]
        assert event.seconds == {"environment": 0.25}
        jax.tree.map(np.testing.assert_array_equal, event.trajectory, sent)
        assert silence(server) == []


def test_several_actors_are_told_apart(address: str, context: zmq.Context) -> None:
    with (
        connected(address, context, 0) as (server, first),
        closing(TrajectoryClient(server.endpoint, 1, CODEC, context)) as second,
    ):
        assert greet(server, second) == [Joined(1)]
        for version, client in [(4, second), (5, first)]:
            hand_credit(server, client, version)
        second.send(Stamp(4, 1, 0), make_trajectory(), [], {})
        assert [event.actor_id for event in collect(server, 1)] == [1]
        first.send(Stamp(5, 0, 0), make_trajectory(), [], {})
        assert [event.actor_id for event in collect(server, 1)] == [0]


def test_over_inproc_nothing_is_copied(context: zmq.Context) -> None:
    unroll = 20_000  # large enough not to be copied as a small message
    codec = make_codec(unroll)
    trajectory = jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), codec.spec)
    with (
        closing(TrajectoryServer("inproc://share", codec, context)) as server,
        closing(TrajectoryClient(server.endpoint, 0, codec, context)) as client,
    ):
        greet(server, client)
        hand_credit(server, client)
        client.send(Stamp(0, 0, 0), trajectory, [], {})
        (event,) = collect(server, 1)
        assert np.shares_memory(event.trajectory.observation, trajectory.observation)


def test_credits_come_in_the_order_they_were_given(address: str, context: zmq.Context) -> None:
    with connected(address, context) as (server, client):
        assert client.credit(0.05) is None
        for _ in range(3):
            client.request()
        assert collect(server, 3) == [Requested(0)] * 3
        for version in (5, 6, 7):
            assert server.grant(0, Credit(version))
        assert [client.credit(5) for _ in range(3)] == [Credit(5), Credit(6), Credit(7)]
        assert client.credit(0) is None


def test_nobody_can_be_given_a_credit_before_joining(address: str, context: zmq.Context) -> None:
    with closing(TrajectoryServer(address, CODEC, context)) as server:
        assert not server.grant(0, Credit(0))
        assert not server.refetch(0)


def test_a_repeated_request_is_one_request(host_address: str, context: zmq.Context) -> None:
    with connected(host_address, context) as (server, client):
        client.request()
        assert client.credit(2.5 * REPEAT_SECONDS) is None  # repeats it twice meanwhile
        assert collect(server, 2, 0.3) == [Requested(0)]
        assert server.grant(0, Credit(1))
        assert client.credit(5) == Credit(1)
        assert client.credit(0.2) is None


def test_an_actor_of_another_run_is_refused_and_told_why(address: str, context: zmq.Context) -> None:
    with closing(TrajectoryServer(address, CODEC, context)) as server:
        with (
            closing(TrajectoryClient(server.endpoint, 2, make_codec(6), context)) as client,
            pytest.raises(Refused, match=r"observation: float32\[7,3,4\] where the learner has float32\[6,3,4\]"),
        ):
            greet(server, client)
        with (
            closing(TrajectoryClient(server.endpoint, 3, make_codec(run="other"), context)) as client,
            pytest.raises(Refused, match='run: "other" where the learner has "run"'),
        ):
            greet(server, client)
        assert not server.grant(2, Credit(0))


def test_without_a_learner_hello_ends(context: zmq.Context) -> None:
    with closing(TrajectoryClient("tcp://127.0.0.1:9", 0, CODEC, context)) as client:
        with pytest.raises(TimeoutError, match=r"tcp://127\.0\.0\.1:9 within 0\.3 s"):
            client.hello(threading.Event(), 0.3)
        stop = threading.Event()
        threading.Timer(0.2, stop.set).start()
        began = time.monotonic()
        client.hello(stop, 30)
        assert time.monotonic() - began < 2


def test_a_sequence_seen_before_is_rejected_and_costs_no_credit(address: str, context: zmq.Context) -> None:
    with connected(address, context) as (server, client):
        for sequence in (0, 1):
            hand_credit(server, client)
            client.send(Stamp(0, 0, sequence), make_trajectory(), [], {})
            assert isinstance(collect(server, 1)[0], Arrived)
        hand_credit(server, client)
        client.send(Stamp(0, 0, 1), make_trajectory(), [], {})
        (event,) = collect(server, 1)
        assert isinstance(event, MessageRejected)
        assert (event.actor_id, event.reason, event.spent) == (0, "replayed", False)
        client.send(Stamp(0, 0, 2), make_trajectory(), [], {})
        assert isinstance(collect(server, 1)[0], Arrived)


def test_a_trajectory_without_credit_is_rejected(address: str, context: zmq.Context) -> None:
    with connected(address, context) as (server, client):
        client.send(Stamp(0, 0, 0), make_trajectory(), [], {})
        (event,) = collect(server, 1)
        assert (event.reason, event.spent) == ("uncredited", False)


def test_a_gap_in_the_sequence_is_reported(address: str, context: zmq.Context) -> None:
    with connected(address, context) as (server, client):
        for _ in range(3):
            hand_credit(server, client)
        client.send(Stamp(0, 0, 2), make_trajectory(), [], {})
        lost, arrived = collect(server, 2)
        assert lost == Lost(0, 2)
        assert arrived.stamp.sequence == 2


def test_values_that_are_not_finite_are_rejected_and_use_up_the_credit(address: str, context: zmq.Context) -> None:
    with connected(address, context) as (server, client):
        for sequence, (value, episodes) in enumerate([(np.nan, []), (1.0, [Episode(np.inf, 1)])]):
            hand_credit(server, client)
            trajectory = make_trajectory()
            trajectory.reward[2, 1] = value
            client.send(Stamp(0, 0, sequence), trajectory, episodes, {})
            (event,) = collect(server, 1)
            assert (event.actor_id, event.reason, event.spent) == (0, "non_finite", True)
        hand_credit(server, client)
        client.send(Stamp(0, 0, 2), make_trajectory(), [], {})
        assert isinstance(collect(server, 1)[0], Arrived)


def test_more_episodes_than_fit_go_with_the_next_trajectory(context: zmq.Context) -> None:
    with connected("inproc://episodes", context) as (server, client):
        episodes = [Episode(float(number), number) for number in range(EPISODES_LIMIT + 10)]
        received: list[Episode] = []
        for sequence, finished in enumerate([episodes, []]):
            hand_credit(server, client)
            client.send(Stamp(0, 0, sequence), make_trajectory(), finished, {})
            received += collect(server, 1)[0].episodes
        assert received == episodes


def test_wake_ends_a_poll_from_another_thread(address: str, context: zmq.Context) -> None:
    server = TrajectoryServer(address, CODEC, context)
    threading.Timer(0.1, server.wake).start()
    began = time.monotonic()
    assert server.poll(20) == []
    assert 0.05 < time.monotonic() - began < 5
    for _ in range(100_000):
        server.wake()  # never blocks, however often
    began = time.monotonic()
    server.poll(20)
    assert time.monotonic() - began < 5
    assert server.poll(0.1) == []
    assert time.monotonic() - began >= 0.1  # one poll forgets all wakes
    server.close()
    server.wake()
