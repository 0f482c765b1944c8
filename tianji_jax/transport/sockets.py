"""How sockets are set up, bound and read; the same for every stream."""

import contextlib
import fcntl
import ipaddress
import os
import shutil
import socket as os_socket
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import zmq

HIGH_WATER = 256
"""Messages queued per peer and direction before a send waits (ZeroMQ's default is 1000).

Credits already bound what a well-behaved peer has under way, mostly far below this. It is there for a peer that
stopped reading or sends without permission: it bounds the memory such a one can hold.
"""

KEEPALIVE_SECONDS = 30
"""Silence on a connection after which TCP asks whether the other host is still there; after three times that it is
given up, and a client connects anew."""

RECONNECT_SECONDS = 1.0
"""Longest pause between attempts to connect. They begin at ten a second and never end."""

HANDSHAKE_SECONDS = 5.0
"""A connection that has not said what it has to by then is given up: a stranger's that says nothing, and that of a peer
whose key is not known, which tries again in case it is by now."""

ZAP_DOMAIN = b"tianji"
"""Under which libzmq asks the authenticator, where there is one (ZeroMQ RFC 27)."""

IPC_PATH_LIMIT = 107
"""Bytes of the path of a Unix domain socket, without the final zero (Linux, unix(7))."""


PREFIX, LOCK = "tianji-", "lock"
"""Names of the directories that hold sockets, and of the file in each that its process holds."""

SWEEP_SECONDS = 60.0
"""Age from which a directory that nobody holds is one that was left behind."""


def open_socket(context: zmq.Context, kind: int, message_limit: int) -> zmq.Socket:
    """A socket for one thread.

    Args:
      context: shared by all threads that talk over `inproc://`.
      kind: `zmq.ROUTER` or `zmq.DEALER`.
      message_limit: bytes of the largest frame to receive; a peer that sends a larger one is disconnected.
    """
    socket = context.socket(kind)
    socket.linger = 0  # a process that ends does not wait for a peer to take its last messages
    socket.sndhwm = socket.rcvhwm = HIGH_WATER
    socket.maxmsgsize = message_limit
    socket.tcp_keepalive, socket.tcp_keepalive_cnt = 1, 2
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = KEEPALIVE_SECONDS
    socket.setsockopt(zmq.TCP_MAXRT, milliseconds(3 * KEEPALIVE_SECONDS))  # the same for what is not acknowledged
    socket.reconnect_ivl_max = milliseconds(RECONNECT_SECONDS)
    socket.handshake_ivl = milliseconds(HANDSHAKE_SECONDS)
    if kind == zmq.ROUTER:
        socket.router_mandatory = True  # sending to a peer that is gone is an error instead of silence
        socket.router_handover = True  # a restarted peer takes over the routing id of its predecessor
    return socket


def bind(socket: zmq.Socket, address: str, allow_plaintext: bool = False) -> str:
    """Listen at `address` and return the address to connect to (with the port chosen for `tcp://127.0.0.1:*`).

    Every listening socket comes through here, so that none is open to other hosts by accident.

    Args:
      socket: already secured with `ServerKeys`, if it is to be.
      address: `inproc://`, `ipc://` or `tcp://`.
      allow_plaintext: beyond loopback, do without keys.

    Raises:
      ValueError: the address is of another kind, or beyond loopback without keys.
      zmq.ZMQError: the address is taken, or not one of this host.
    """
    if not address.startswith(("inproc://", "ipc://", "tcp://")):
        raise ValueError(f"address {address!r}; one of inproc://, ipc:// or tcp:// is expected")
    secured = bool(socket.curve_server) or allow_plaintext
    if address.startswith("tcp://") and not (secured or is_loopback(address)):
        raise ValueError(f"address {address!r} is beyond loopback, which needs keys; tcp://127.0.0.1:PORT does not")
    if address.startswith("tcp://") and not socket.curve_server:
        # With a domain libzmq lets in no peer of ZMTP 1, which is what noise looks like. If the handshake of one ended
        # while the socket closes, libzmq would abort the process (an assertion in zmtp_engine.cpp).
        socket.zap_domain = ZAP_DOMAIN
    socket.ipv6 = "[" in address
    socket.bind(address)
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()


def receive(socket: zmq.Socket, max_frames: int) -> list[zmq.Frame] | None:
    """The next message, or None when there is none; never waits, never copies.

    Frames beyond the first `max_frames + 1` are thrown away: enough to see that there were too many.
    """
    try:
        frames = [socket.recv(zmq.NOBLOCK, copy=False)]
    except zmq.Again:
        return None
    last = frames[0]
    while last.more:
        last = socket.recv(copy=False)  # never waits: messages arrive whole
        if len(frames) <= max_frames:
            frames.append(last)
    return frames


def milliseconds(seconds: float) -> int:
    """A timeout as `poll` takes it; rounded up, so that a short wait does not become a busy loop."""
    return max(0, int(-(-seconds * 1000 // 1)))


class Waker:
    """Lets any thread end another thread's `poll` (sockets of ZeroMQ may not be shared, this may)."""

    def __init__(self) -> None:
        self._receiver, self._sender = os_socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def fileno(self) -> int:
        """What to register in a poller."""
        return self._receiver.fileno()

    def wake(self) -> None:
        """Make the poll in progress, or else the next, return at once; harmless after `close`."""
        with contextlib.suppress(OSError):  # a full buffer wakes as well, and a closed one has nobody to wake
            self._sender.send(b"\0")

    def clear(self) -> None:
        """Forget all wakes so far."""
        with contextlib.suppress(BlockingIOError):
            while self._receiver.recv(4096):
                pass

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()


@contextlib.contextmanager
def local_address(kind: str) -> Iterator[str]:
    """A fresh address on this host to bind to; what it leaves on disk is removed at the end.

    Args:
      kind: "inproc" (threads of this process that share a context) or "ipc" (processes of this user).

    Raises:
      ValueError: another kind, or the temporary directory's path leaves no room for an address.
    """
    if kind == "inproc":
        yield f"inproc://{uuid.uuid4().hex}"
    elif kind == "ipc":
        _sweep(Path(tempfile.gettempdir()))
        # The directory has mode 0700: other users of the host cannot connect.
        with (
            tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as directory,
            (Path(directory) / LOCK).open("w") as lock,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = Path(directory) / "s"
            if len(bytes(path)) > IPC_PATH_LIMIT:
                raise ValueError(
                    f"{path} is too long for a socket ({len(bytes(path))} bytes, at most {IPC_PATH_LIMIT}); "
                    "set TMPDIR to a shorter directory"
                )
            yield f"ipc://{path}"
    else:
        raise ValueError(f"kind of address {kind!r}; inproc or ipc is expected")


def _sweep(directory: Path) -> None:
    """Remove what processes that were killed left behind: nobody holds its lock any more."""
    for left in directory.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            # One that is just being made is not held yet.
            if left.stat().st_uid == os.getuid() and time.time() - left.stat().st_mtime > SWEEP_SECONDS:
                with (left / LOCK).open() as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left)


def is_loopback(address: str) -> bool:
    """Whether a `tcp://HOST:PORT` can only be reached from this host; False also for names that are not looked up."""
    host = address.removeprefix("tcp://").rpartition(":")[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
