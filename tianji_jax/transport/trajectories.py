"""The stream of trajectories from actors to a learner, and of credits back (DEALER and ROUTER).

An actor says hello, asks for credits and sends one trajectory per credit. Both directions survive a broken connection:
requests and credits are numbered, so that either side can repeat what it said, and a trajectory lost on the way shows
as a gap in the sequence. A learner that restarted asks the actors it does not know to say hello again.
"""

import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import zmq

from tianji_jax.transport.codec import Codec, Frame, Header, Rejected, read_int
from tianji_jax.transport.events import (
    Arrived,
    Credit,
    Event,
    Joined,
    Lost,
    MessageRejected,
    Refused,
    Requested,
    read_episodes,
    read_seconds,
)
from tianji_jax.transport.sockets import Waker, bind, milliseconds, open_socket, receive
from tianji_jax.types import Episode, PyTree, Stamp, Trajectory
from tianji_jax.worker import POLL_SECONDS

REPEAT_SECONDS = 1.0
"""How long a client waits for an answer before it repeats its message; repeats have no effect of their own."""

SEND_SECONDS = 30.0
"""How long a client waits to hand over a message while its queue is full."""

EPISODES_LIMIT = 8192
"""Most finished episodes in one message, so that they fit its header; further ones go with the next."""

DRAIN_LIMIT = 64
"""Most messages taken in by one `TrajectoryServer.poll`."""

REQUEST_LIMIT = 1024
"""Most credits an actor may ask for at once."""


class TrajectoryClient:
    """An actor's end of the stream; belongs to one thread."""

    def __init__(self, address: str, actor_id: int, codec: Codec, context: zmq.Context) -> None:
        """Connect to `address` (the server may come later; over tcp and ipc it may also come again).

        Args:
          address: the server's `endpoint`.
          actor_id: unique among the learner's actors, from 0.
          codec: for `Trajectory`, of the same spec and fingerprint as the server's.
          context: the server's own when the address is `inproc://`.
        """
        self.address = address
        self.actor_id = actor_id
        self._codec = codec
        self._incarnation = secrets.randbits(62)
        self._requested = 0
        self._received = 0
        self._sequence = 0
        self._stop = threading.Event()
        self._welcome = False
        self._refetch = False
        self._repeat_at = 0.0
        self._episodes: list[Episode] = []
        self._socket = open_socket(context, zmq.DEALER, codec.message_limit)
        self._socket.routing_id = b"%d" % actor_id
        self._socket.connect(address)

    def hello(self, stop: threading.Event, timeout: float) -> None:
        """Introduce this actor and wait for the welcome; returns early when `stop` is set.

        From then on `stop` also ends the wait of a message that nobody takes; the message is then dropped.

        Raises:
          Refused: the learner's run is not the one this actor was made for.
          TimeoutError: no answer within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        self._stop = stop
        self._welcome, repeat = False, 0.0
        while not self._welcome and not stop.is_set():
            now = time.monotonic()
            if now >= deadline:
                raise TimeoutError(f"no learner answered at {self.address} within {timeout} s")
            if now >= repeat:
                self._say_hello()
                repeat = now + REPEAT_SECONDS
            self._wait(min(POLL_SECONDS, deadline - now))

    def request(self) -> None:
        """Ask for one credit."""
        self._requested += 1
        self._say_request()

    def credit(self, timeout: float) -> Credit | None:
        """The next credit asked for, or None when none has come within `timeout` seconds.

        Raises:
          Refused: the learner was restarted with another run.
        """
        deadline = time.monotonic() + timeout
        while True:
            now = time.monotonic()
            repeat_at = self._repeat_at if self._received < self._requested else deadline
            if repeat_at <= now < deadline:
                self._say_request()
                continue
            credit = self._wait(max(0.0, min(deadline, repeat_at) - now))
            if credit is not None or time.monotonic() >= deadline:
                return credit

    def send(self, stamp: Stamp, trajectory: Trajectory, episodes: list[Episode], seconds: dict[str, float]) -> None:
        """Send one trajectory without copying it: its arrays must never be written again.

        ZeroMQ reads them later, and over `inproc://` the receiver keeps them; each trajectory has buffers of its own.

        Args:
          stamp: with this actor's id, and a sequence number one higher than the last.
          trajectory: NumPy arrays as the codec's spec says.
          episodes: those that finished during the unroll.
          seconds: where the time went during the unroll, by activity.

        Raises:
          ValueError: the trajectory is not as the spec says.
          TimeoutError: the queue has been full for `SEND_SECONDS`.
        """
        self._episodes += episodes
        now, later = self._episodes[:EPISODES_LIMIT], self._episodes[EPISODES_LIMIT:]
        header = {
            "kind": "trajectory",
            "incarnation": self._incarnation,
            "received": self._received,
            "version": int(stamp.policy_version),
            "sequence": int(stamp.sequence),
            "returns": np.array([episode.episode_return for episode in now], "<f8").tobytes(),
            "lengths": np.array([episode.length for episode in now], "<i8").tobytes(),
            "seconds": {name: float(value) for name, value in seconds.items()},
        }
        self._send(self._codec.encode(header, trajectory))
        self._episodes = later
        self._sequence = int(stamp.sequence) + 1

    def take_refetch(self) -> bool:
        """Whether the learner has asked, since the last call, that parameters be fetched anew (`refetch`)."""
        refetch, self._refetch = self._refetch, False
        return refetch

    def close(self) -> None:
        """Close at once; what has not been sent is dropped."""
        self._socket.close()

    def _say_hello(self) -> None:
        hello = {"kind": "hello", "sequence": self._sequence, "description": self._codec.description}
        self._say(hello)

    def _say_request(self) -> None:
        self._repeat_at = time.monotonic() + REPEAT_SECONDS
        self._say({"kind": "request", "requested": self._requested})

    def _say(self, fields: Header) -> None:
        fields = {"incarnation": self._incarnation, "received": self._received, **fields}
        self._send([self._codec.encode_header(fields)])

    def _send(self, frames: list[Frame]) -> None:
        deadline = time.monotonic() + SEND_SECONDS
        while not self._socket.poll(milliseconds(POLL_SECONDS), zmq.POLLOUT):
            if self._stop.is_set():
                return
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{self.address} has taken no message for {SEND_SECONDS} s")
        self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def _wait(self, seconds: float) -> Credit | None:
        """Take in at most one message, waiting for it up to `seconds`."""
        if not self._socket.poll(milliseconds(seconds)):
            return None
        frames = receive(self._socket, 1)
        header = self._codec.decode_header(frames[0]) if frames else {}
        kind = header.get("kind")
        if kind == "refused":
            raise Refused(str(header.get("message")))
        if kind == "unknown":
            self._say_hello()
            self._say_request()
        elif header.get("incarnation") != self._incarnation:
            return None  # meant for an earlier actor of this id
        elif kind == "welcome":
            self._welcome = True
        elif kind == "refetch":
            self._refetch = True
        elif kind == "credit" and read_int(header, "index") == self._received + 1:
            self._received += 1
            return Credit(read_int(header, "version"))
        return None


@dataclass
class _Peer:
    """What a server knows of an actor.

    Attributes:
      incarnation: a number that tells an actor from its predecessors of the same id.
      sequence: the next expected.
      requested: credits asked for, as the actor counts.
      granted: credits given, as the actor counts.
      unspent: credits given that no trajectory has used up.
      sent: index and version of credits given that the actor has not told to have received.
    """

    incarnation: int
    sequence: int
    requested: int
    granted: int
    unspent: int = 0
    sent: deque[tuple[int, int]] = field(default_factory=deque)


class TrajectoryServer:
    """A learner's end of the stream. Belongs to one thread; only `wake` may be called from any.

    A trajectory without a credit is rejected, so that what is granted bounds what arrives. Every credit granted since
    an actor joined comes back in exactly one event: `Arrived`, `Lost` or `MessageRejected` with `spent`; until then it
    is under way, or ends with the actor.

    Attributes:
      endpoint: the address to connect to.
    """

    def __init__(self, address: str, codec: Codec, context: zmq.Context) -> None:
        """Listen at `address` (`tcp://127.0.0.1:*` chooses a port).

        Raises:
          ValueError: not an address to listen at; beyond loopback keys would be needed.
          zmq.ZMQError: the address is taken.
        """
        self._codec = codec
        self._peers: dict[int, _Peer] = {}
        self._socket = open_socket(context, zmq.ROUTER, codec.message_limit)
        try:
            self.endpoint = bind(self._socket, address)
        except BaseException:
            self._socket.close()
            raise
        self._waker = Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._waker, zmq.POLLIN)

    def poll(self, timeout: float) -> list[Event]:
        """What has happened, at most `DRAIN_LIMIT` messages of it; empty after `timeout` seconds or a `wake`."""
        self._poller.poll(milliseconds(timeout))
        self._waker.clear()
        events: list[Event] = []
        for _ in range(DRAIN_LIMIT):
            frames = receive(self._socket, 1 + self._codec.frame_count)
            if frames is None:
                break
            self._take(frames, events)
        return events

    def grant(self, actor_id: int, credit: Credit) -> bool:
        """Give an actor one credit; False when it is not there to take it (its request then stands no more)."""
        peer = self._peers.get(actor_id)
        if peer is None:
            return False
        if not self._send_credit(actor_id, peer, peer.granted + 1, credit.version):
            peer.requested = max(peer.granted, peer.requested - 1)  # it will ask again when it is back
            return False
        peer.granted += 1
        peer.unspent += 1
        peer.sent.append((peer.granted, credit.version))
        return True

    def refetch(self, actor_id: int) -> bool:
        """Tell an actor to fetch parameters anew (its stamp is from the future: this learner restarted from an
        earlier version); False when it is not there."""
        peer = self._peers.get(actor_id)
        return peer is not None and self._say(actor_id, {"kind": "refetch", "incarnation": peer.incarnation})

    def wake(self) -> None:
        """Make the `poll` in progress, or else the next, return at once; callable from any thread."""
        self._waker.wake()

    def close(self) -> None:
        """Close at once; what has not been sent is dropped."""
        self._socket.close()
        self._waker.close()

    def _take(self, frames: list[zmq.Frame], events: list[Event]) -> None:
        identity = frames[0].bytes
        actor_id = int(identity) if identity.isdigit() and len(identity) < 10 else None
        peer, spent_before = None, 0
        try:
            if actor_id is None or len(frames) == 1:
                raise Rejected("malformed", f"message of {len(frames)} frames from {identity!r:.40}")
            header = self._codec.decode_header(frames[1])
            if header["kind"] == "hello":
                events += self._on_hello(actor_id, header)
                return
            peer = self._peers.get(actor_id)
            if peer is None or read_int(header, "incarnation") != peer.incarnation:
                peer = None
                self._say(actor_id, {"kind": "unknown"})
                raise Rejected("unknown", f"{header['kind']!r:.40} from an actor that has not said hello")
            spent_before = peer.unspent
            events += self._on_message(actor_id, peer, header, frames[2:])
        except Rejected as error:
            if actor_id is not None and error.reason in ("fingerprint", "protocol"):
                self._say(actor_id, {"kind": "refused", "message": error.detail})
            spent = peer is not None and peer.unspent < spent_before
            events.append(MessageRejected(actor_id, error.reason, error.detail, spent))

    def _on_hello(self, actor_id: int, header: Header) -> list[Event]:
        if header.get("fingerprint") != self._codec.fingerprint:
            difference = self._codec.difference(str(header.get("description")))
            raise Rejected("fingerprint", f"the actor was made for another run: {difference}")
        incarnation, received = read_int(header, "incarnation"), read_int(header, "received")
        known = self._peers.get(actor_id)
        joined = known is None or known.incarnation != incarnation
        if joined:
            sequence = read_int(header, "sequence")
            self._peers[actor_id] = _Peer(incarnation, sequence, requested=received, granted=received)
        self._say(actor_id, {"kind": "welcome", "incarnation": incarnation})
        return [Joined(actor_id)] if joined else []

    def _on_message(self, actor_id: int, peer: _Peer, header: Header, payload: list[zmq.Frame]) -> list[Event]:
        received = read_int(header, "received")
        while peer.sent and peer.sent[0][0] <= received:
            peer.sent.popleft()
        if header["kind"] == "request":
            return self._on_request(actor_id, peer, read_int(header, "requested"))
        if header["kind"] == "trajectory":
            return self._on_trajectory(actor_id, peer, header, payload)
        raise Rejected("malformed", f"kind {header['kind']!r:.40}")

    def _on_request(self, actor_id: int, peer: _Peer, requested: int) -> list[Event]:
        new = requested - peer.requested
        if new > REQUEST_LIMIT:
            raise Rejected("malformed", f"{new} credits asked for at once; at most {REQUEST_LIMIT} are allowed")
        if new <= 0:  # a repeat: what was granted may be lost
            for index, version in peer.sent:
                self._send_credit(actor_id, peer, index, version)
            return []
        peer.requested = requested
        return [Requested(actor_id)] * new

    def _on_trajectory(self, actor_id: int, peer: _Peer, header: Header, payload: list[zmq.Frame]) -> list[Event]:
        sequence = read_int(header, "sequence")
        if sequence < peer.sequence:
            raise Rejected("replayed", f"sequence {sequence} again; {peer.sequence} is expected")
        if not peer.unspent:
            raise Rejected("uncredited", f"sequence {sequence} of an actor without credit")
        lost = min(sequence - peer.sequence, peer.unspent - 1)
        peer.sequence = sequence + 1
        events: list[Event] = [Lost(actor_id, lost)] if lost else []
        peer.unspent -= lost + 1
        try:
            stamp = Stamp(read_int(header, "version"), actor_id, sequence)
            episodes, seconds = read_episodes(header), read_seconds(header)
            trajectory: PyTree = self._codec.decode_payload(header, payload, finite=True)
        except Rejected as error:
            return [*events, MessageRejected(actor_id, error.reason, error.detail, spent=True)]
        return [*events, Arrived(actor_id, stamp, trajectory, episodes, seconds)]

    def _send_credit(self, actor_id: int, peer: _Peer, index: int, version: int) -> bool:
        fields = {"kind": "credit", "incarnation": peer.incarnation, "index": index, "version": version}
        return self._say(actor_id, fields)

    def _say(self, actor_id: int, fields: Header) -> bool:
        try:
            frames = [b"%d" % actor_id, self._codec.encode_header(fields)]
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):  # gone, or not reading
                return False
            raise
        return True
