"""The listening sockets of one server, as one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import zmq

from tianji_jax.transport.codec import Frame
from tianji_jax.transport.keys import ServerKeys
from tianji_jax.transport.peers import Peer
from tianji_jax.transport.sockets import HIGH_WATER, Waker, bind, milliseconds, open_socket, receive

LOCAL, OUTSIDE = 0, 1
"""The doors: for this process or this user's processes, and for those who come over TCP."""

DRAIN_LIMIT = 64
"""Most messages taken in from one door before the server looks after other things."""


@dataclass(frozen=True)
class Outside:
    """A second address of a server, for peers that it did not start.

    Attributes:
      address: `tcp://HOST:PORT`.
      keys: who may connect; None for everybody.
      allow_plaintext: beyond loopback, do without keys.
      actor_ids: that peers from there may have; those from the local door have others.
    """

    address: str
    keys: ServerKeys | None
    allow_plaintext: bool
    actor_ids: range


class Router:
    """One socket per door, so that nobody from outside can pose as a local peer, starve one, or ask it for keys.

    Belongs to one thread; only `wake` may be called from any.

    Attributes:
      endpoint: the local address to connect to.
    """

    def __init__(
        self,
        address: str,
        context: zmq.Context,
        message_limit: int,
        outside: Outside | None = None,
        high_water: int = HIGH_WATER,
    ) -> None:
        """Listen.

        Args:
          address: the local one (`tcp://127.0.0.1:*` chooses a port).
          context: shared with clients when the address is `inproc://`.
          message_limit: see `open_socket`.
          outside: the other, if any.
          high_water: messages queued for a peer before further ones are not taken.

        Raises:
          ValueError: not an address to listen at; beyond loopback without keys.
          zmq.ZMQError: an address is taken.
        """
        self._sockets: list[zmq.Socket] = []
        try:
            self._sockets.append(_open(context, message_limit, high_water))
            self.endpoint = bind(self._sockets[LOCAL], address)
            if outside is not None:
                self._sockets.append(_open(context, message_limit, high_water))
                if outside.keys is not None:
                    outside.keys.secure(self._sockets[OUTSIDE])
                bind(self._sockets[OUTSIDE], outside.address, outside.allow_plaintext)
        except BaseException:
            for socket in self._sockets:
                socket.close()
            raise
        self._waker = Waker()
        self._poller = zmq.Poller()
        for readable in (*self._sockets, self._waker):
            self._poller.register(readable, zmq.POLLIN)

    def wait(self, timeout: float) -> None:
        """Until there are messages, or a `wake`, or `timeout` seconds are over."""
        self._poller.poll(milliseconds(timeout))
        self._waker.clear()

    def messages(self, max_frames: int) -> Iterator[tuple[Peer, list[zmq.Frame]]]:
        """What is there, without waiting, at most `DRAIN_LIMIT` from each door.

        Args:
          max_frames: of a message; of those beyond it one is kept, to tell that there were too many.
        """
        for door, socket in enumerate(self._sockets):
            for _ in range(DRAIN_LIMIT):
                frames = receive(socket, 1 + max_frames)
                if frames is None:
                    break
                yield Peer(door, frames[0].bytes), frames[1:]

    def send(self, peer: Peer, frames: Sequence[Frame]) -> bool:
        """Send without waiting and without copying; False when the peer is gone or does not read."""
        try:
            self._sockets[peer.door].send_multipart([peer.identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def wake(self) -> None:
        """Make the `wait` in progress, or else the next, return at once; callable from any thread."""
        self._waker.wake()

    def close(self) -> None:
        """Close at once; what has not been sent is dropped."""
        for socket in self._sockets:
            socket.close()
        self._waker.close()


def _open(context: zmq.Context, message_limit: int, high_water: int) -> zmq.Socket:
    socket = open_socket(context, zmq.ROUTER, message_limit)
    socket.sndhwm = high_water
    return socket
