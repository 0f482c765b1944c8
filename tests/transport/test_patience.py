"""A client that waits for its server as long as it takes."""

import threading
import time
from contextlib import closing

import zmq
from streams import CODEC, collect, eventually, greet, hand_credit, make_trajectory, until

from tianji_jax.transport import Arrived, Credit, Joined, MessageRejected, Requested, TrajectoryClient, TrajectoryServer
from tianji_jax.transport.trajectory_client import REPEAT_SECONDS
from tianji_jax.types import Stamp


def test_nothing_queues_for_a_server_that_is_away(context: zmq.Context) -> None:
    """Requests that are repeated meanwhile would be many, and rubbish to the one that comes."""
    away = 4 * REPEAT_SECONDS
    with closing(TrajectoryServer("tcp://127.0.0.1:*", CODEC, context)) as old:
        endpoint = old.endpoint
        with closing(TrajectoryClient(endpoint, 3, CODEC, context, patient=True)) as client:
            assert greet(old, client) == [Joined(3)]
            hand_credit(old, client)
            assert client.connected
            old.close()
            until(lambda: not client.connected)
            client.request()
            assert client.credit(away) is None
            sending = threading.Thread(target=client.send, args=(Stamp(0, 3, 0), make_trajectory(), [], {}))
            sending.start()
            with closing(eventually(lambda: TrajectoryServer(endpoint, CODEC, context))) as new:
                # The trajectory is of a credit that this server did not give.
                (unknown,) = collect(new, 1)
                assert isinstance(unknown, MessageRejected)
                sending.join()
                credits: list[Credit | None] = []
                waiting = threading.Thread(target=lambda: credits.append(client.credit(10)))
                waiting.start()
                assert collect(new, 2) == [Joined(3), Requested(3)]
                assert new.grant(3, Credit(5))
                waiting.join()
                assert credits == [Credit(5)]
                client.send(Stamp(5, 3, 1), make_trajectory(), [], {})
                assert isinstance(collect(new, 1)[0], Arrived)


def test_waiting_ends_when_it_is_told_to(context: zmq.Context) -> None:
    stop = threading.Event()
    with closing(TrajectoryClient("tcp://127.0.0.1:9", 3, CODEC, context, patient=True)) as client:
        threading.Timer(0.3, stop.set).start()
        began = time.monotonic()
        client.hello(stop, 60)
        client.send(Stamp(0, 3, 0), make_trajectory(), [], {})
        assert time.monotonic() - began < 2
