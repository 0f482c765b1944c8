"""An actor's end of the stream of trajectories; the protocol is told in `trajectories`."""

import threading
import time

import numpy as np
import zmq

from tianji_jax.transport.codec import Codec, Frame, Header, read_int
from tianji_jax.transport.events import Credit, Refused
from tianji_jax.transport.keys import ClientKeys, connect
from tianji_jax.transport.peers import actor_identity
from tianji_jax.transport.sockets import milliseconds, open_socket, receive
from tianji_jax.types import Episode, Stamp, Trajectory
from tianji_jax.worker import POLL_SECONDS

REPEAT_SECONDS = 1.0
"""How long a client waits for an answer before it repeats its message; repeats have no effect of their own."""

SEND_SECONDS = 30.0
"""How long a client waits to hand over a message while its queue is full."""

EPISODES_LIMIT = 8192
"""Most finished episodes in one message, so that they fit its header; further ones go with the next."""


class TrajectoryClient:
    """An actor's end of the stream; belongs to one thread."""

    def __init__(
        self,
        address: str,
        actor_id: int,
        codec: Codec,
        context: zmq.Context,
        keys: ClientKeys | None = None,
        patient: bool = False,
    ) -> None:
        """Connect to `address` (the server may come later; over tcp and ipc it may also come again).

        Args:
          address: the server's `endpoint`.
          actor_id: unique among the learner's actors, from 0 to `ID_LIMIT` - 1.
          codec: for `Trajectory`, of the same spec and settings as the server's.
          context: the server's own when the address is `inproc://`.
          keys: for a server that asks for them.
          patient: wait for a server that is away as long as it takes, and queue nothing for it meanwhile: one that
            comes again would find what was meant for its predecessor.
        """
        self.address = address
        self.actor_id = actor_id
        self._patient = patient
        self._codec = codec
        self._requested = 0
        self._received = 0
        self._sequence = 0
        self._stop = threading.Event()
        self._welcome = False
        self._refetch = False
        self._forgotten = False
        self._repeat_at = 0.0
        self._episodes: list[Episode] = []
        self._socket = open_socket(context, zmq.DEALER, codec.message_limit)
        self._socket.routing_id = actor_identity(actor_id)
        self._socket.immediate = patient
        connect(self._socket, address, keys)

    def hello(self, stop: threading.Event, timeout: float, sequence: int = 0) -> None:
        """Introduce this actor and wait for the welcome; returns early when `stop` is set.

        From then on `stop` also ends the wait of a message that nobody takes; the message is then dropped.

        Args:
          stop: ends the wait.
          timeout: in seconds.
          sequence: of the first trajectory that will be sent.

        Raises:
          Refused: the learner's run is not the one this actor was made for, or has another actor of this id.
          TimeoutError: no answer within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        self._stop, self._sequence = stop, sequence
        self._welcome, repeat = False, 0.0
        while not self._welcome and not stop.is_set():
            now = time.monotonic()
            if now >= deadline:
                raise TimeoutError(
                    f"no learner answered at {self.address} within {timeout} s: none is running there, or it does not "
                    "have the same keys (security.keys of both sides), which it does not tell strangers"
                )
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
          Refused: another actor of this id has said hello, too much of this one's was rejected, or the learner was
            restarted with another run.
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
          seconds: where the time went since the trajectory before was sent, by stage.

        Raises:
          ValueError: the trajectory is not as the spec says.
          TimeoutError: the queue has been full for `SEND_SECONDS`, and the client is not patient.
        """
        self._episodes += episodes
        now, later = self._episodes[:EPISODES_LIMIT], self._episodes[EPISODES_LIMIT:]
        header = {
            "kind": "trajectory",
            "received": self._received,
            "version": int(stamp.policy_version),
            "sequence": int(stamp.sequence),
            "returns": np.array([episode.episode_return for episode in now], "<f8").tobytes(),
            "lengths": np.array([episode.length for episode in now], "<i8").tobytes(),
            "seconds": {name: float(value) for name, value in seconds.items()},
            "sent": time.time(),
        }
        self._send(self._codec.encode(header, trajectory))
        self._episodes = later
        self._sequence = int(stamp.sequence) + 1

    def take_refetch(self) -> bool:
        """Whether the learner has asked, since the last call, that parameters be fetched anew (`refetch`)."""
        refetch, self._refetch = self._refetch, False
        return refetch

    def take_forgotten(self) -> bool:
        """Whether, since the last call, there was a learner that did not know this actor: a new one at the address."""
        forgotten, self._forgotten = self._forgotten, False
        return forgotten

    def close(self) -> None:
        """Close at once; what has not been sent is dropped."""
        self._socket.close()

    def _say_hello(self) -> None:
        hello = {"kind": "hello", "sequence": self._sequence, "description": self._codec.description}
        self._say(hello)

    def _say_request(self) -> None:
        self._repeat_at = time.monotonic() + REPEAT_SECONDS
        self._say({"kind": "request", "requested": self._requested, "sequence": self._sequence})

    @property
    def connected(self) -> bool:
        """Whether there is a server to send to; known only to a `patient` client."""
        return bool(self._socket.poll(0, zmq.POLLOUT))

    def _say(self, fields: Header) -> None:
        if self._patient and not self._socket.poll(milliseconds(POLL_SECONDS), zmq.POLLOUT):
            return  # it will be repeated
        self._send([self._codec.encode_header({"received": self._received, **fields})])

    def _send(self, frames: list[Frame]) -> None:
        deadline = time.monotonic() + SEND_SECONDS
        while not self._socket.poll(milliseconds(POLL_SECONDS), zmq.POLLOUT):
            if self._stop.is_set():
                return
            if time.monotonic() >= deadline and not self._patient:
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
            self._forgotten = True
            self._say_hello()
            self._say_request()
        elif kind == "welcome":
            self._welcome = True
        elif kind == "refetch":
            self._refetch = True
        elif kind == "credit" and read_int(header, "index") == self._received + 1:
            self._received += 1
            return Credit(read_int(header, "version"))
        return None
