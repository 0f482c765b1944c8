"""How the keepers of several learners talk: each tells that of learner 0 once a second how its learner is, and is told
how all are. A few hundred bytes of JSON; what cannot be read is passed over.
"""

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import zmq

from tianji_jax.roll import GRACE_SECONDS, IN_ORDER, Place, Roll, how
from tianji_jax.transport.keys import Authenticator, ServerKeys, connect
from tianji_jax.transport.sockets import bind, is_loopback, milliseconds, open_socket
from tianji_jax.worker import Workers

BEAT_SECONDS = 1.0
"""Between two signs of life."""

MESSAGE_LIMIT = 4096
"""Bytes of a message."""


class Patience(NamedTuple):
    """How long others are waited for, in seconds.

    Attributes:
      gather: until all are there.
      silence: of one that was there.
    """

    gather: float
    silence: float


class Standing(NamedTuple):
    """How a learner is.

    Attributes:
      name: host and process.
      silent: seconds since its training process gave a sign of life.
      code: exit code of that; None while it runs, or has not begun.
    """

    name: str
    silent: float
    code: int | None


class Meeting:
    """One keeper's side.

    Attributes:
      complete: all learners are there.
      over: all have ended in good order.
      why: all have to end.
    """

    def __init__(self, socket: zmq.Socket, place: Place, patience: Patience) -> None:
        self.complete = self.over = False
        self.why: str | None = None
        self._socket, self._place, self._patience = socket, place, patience

    def turn(self, standing: Standing) -> None:
        """Tell the others how this learner is, and hear for `BEAT_SECONDS` how they are."""
        raise NotImplementedError

    def _tell(self, message: dict[str, Any], to: bytes | None = None) -> None:
        frames = [json.dumps(message).encode()]
        with contextlib.suppress(zmq.ZMQError):  # nobody is there; silence is what the other side goes by
            self._socket.send_multipart(frames if to is None else [to, *frames], zmq.NOBLOCK)

    def _hear(self) -> Iterator[tuple[bytes, Any]]:
        deadline = time.monotonic() + BEAT_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            if self._socket.poll(milliseconds(left)):
                *sender, data = self._socket.recv_multipart()
                with contextlib.suppress(ValueError, RecursionError):
                    yield b"".join(sender), json.loads(data)


class _Leader(Meeting):
    def __init__(self, socket: zmq.Socket, place: Place, patience: Patience) -> None:
        super().__init__(socket, place, patience)
        self._roll = Roll(place.size, time.monotonic(), *patience)
        self._peers: set[bytes] = set()

    def turn(self, standing: Standing) -> None:
        self._take(0, self._place.size, standing)
        for peer, message in self._hear():
            with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
                standing = Standing(str(message["name"]), float(message["silent"]), message["code"])
                self._take(int(message["rank"]), int(message["size"]), standing)
                self._peers.add(peer)
        roll = self._roll
        self.complete, self.over, self.why = roll.complete, roll.over, roll.verdict(time.monotonic())
        for peer in self._peers:
            self._tell({"complete": self.complete, "over": self.over, "why": self.why}, to=peer)

    def _take(self, rank: int, size: int, standing: Standing) -> None:
        now = time.monotonic()
        self._roll.heard(rank, size, standing.name, standing.silent, now)
        if standing.code is not None:
            self._roll.ended(rank, int(standing.code), now)


class _Follower(Meeting):
    def __init__(self, socket: zmq.Socket, place: Place, patience: Patience) -> None:
        super().__init__(socket, place, patience)
        self._heard = time.monotonic()
        self._ended: float | None = None

    def turn(self, standing: Standing) -> None:
        self._tell({"rank": self._place.rank, "size": self._place.size, **standing._asdict()})
        for _, message in self._hear():
            with contextlib.suppress(KeyError, TypeError):
                complete, over, why = message["complete"], message["over"], message["why"]
                self.complete, self.over, self.why = bool(complete), bool(over), None if why is None else str(why)
                self._heard = time.monotonic()
        self._without_leader(standing.code)

    def _without_leader(self, code: int | None) -> None:
        """What is to be done where learner 0's keeper says nothing."""
        silence, leader = time.monotonic() - self._heard, f"learner 0 at {self._place.meeting}"
        if silence < GRACE_SECONDS:
            return
        if code in IN_ORDER:
            self.over = True
        elif code is not None:
            self.why = f"{leader} has not been heard of for {silence:.0f} s, and learner {self._place.rank} {how(code)}"
        elif silence >= (self._patience.silence if self.complete else self._patience.gather):
            setting = "silence_seconds" if self.complete else "gather_seconds"
            self.why = f"{leader} has not been heard of for {silence:.0f} s (learner.{setting})"


@contextlib.contextmanager
def open_meeting(place: Place, patience: Patience, keys: ServerKeys | None) -> Iterator[Meeting]:
    """Listen as learner 0, or connect to it.

    Args:
      place: of this learner.
      patience: with the others.
      keys: one pair for all learners; None to do without.

    Raises:
      zmq.ZMQError: learner 0 cannot listen at the port.
    """
    context, workers = zmq.Context(), Workers()
    with contextlib.ExitStack() as undo:
        undo.callback(context.destroy, linger=0)
        undo.callback(workers.close, 2.0)
        socket = open_socket(context, zmq.ROUTER if place.rank == 0 else zmq.DEALER, MESSAGE_LIMIT)
        if place.rank == 0:
            if keys is not None:
                authenticator = Authenticator(frozenset([keys.public]), context)
                workers.start("authenticator", authenticator.run)
                keys.secure(socket)
            # The name by which others reach this host may be none of its addresses.
            here = place.meeting if is_loopback(place.meeting) else f"tcp://0.0.0.0:{place.port + 1}"
            bind(socket, here, allow_plaintext=True)  # the caller has seen to keys
            yield _Leader(socket, place, patience)
        else:
            socket.routing_id = f"learner-{place.rank}".encode()
            connect(socket, place.meeting, None if keys is None else keys.as_client())
            yield _Follower(socket, place, patience)
