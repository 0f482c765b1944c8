"""Parameters from a learner to its actors, by long poll (ROUTER and DEALER).

An actor asks for parameters newer than those it has; the learner answers when it has some, with the newest. So a
late joiner gets the current ones, a slow actor skips what it missed, and one version at most is under way to an actor.
(PUB/SUB loses what is published before the subscription arrives, and `ZMQ_CONFLATE` keeps single parts of a message.)
"""

import contextlib
import itertools
import threading
import time
from collections import Counter
from typing import NamedTuple

import zmq

from tianji_jax.transport.codec import Codec, Frame, Rejected, read_int
from tianji_jax.transport.keys import ClientKeys, connect
from tianji_jax.transport.peers import Offenders, Peer, Table
from tianji_jax.transport.router import Outside, Router
from tianji_jax.transport.sockets import milliseconds, open_socket, receive
from tianji_jax.types import PyTree
from tianji_jax.worker import POLL_SECONDS

REPEAT_SECONDS = 1.0
"""How long a client waits before it repeats its request, which may have gone to a learner that is no more."""

RELAY_SECONDS = 5.0
"""How long a relay waits for the next version before it looks whether the learner has begun anew."""

UNDER_WAY = 2
"""Answers queued for a client. It asks for one at a time; one that asks and does not read holds no more versions."""


class VersionGone(LookupError):
    """The learner does not keep the exact version asked for any more."""


class _Request(NamedTuple):
    number: int
    version: int
    exact: bool


class ParameterServer:
    """A learner's end. `serve` runs on a thread of its own; `publish` may be called from any thread.

    Attributes:
      endpoint: the address to connect to.
    """

    def __init__(
        self, address: str, codec: Codec, context: zmq.Context, keep: int = 1, outside: Outside | None = None
    ) -> None:
        """Listen at `address` (`tcp://127.0.0.1:*` chooses a port).

        Args:
          address: `inproc://`, `ipc://` or `tcp://` on loopback.
          codec: for the parameters.
          context: shared with clients when the address is `inproc://`.
          keep: how many of the latest versions stay to be asked for exactly.
          outside: where to listen beside it.

        Raises:
          ValueError: not an address to listen at, beyond loopback without keys, or `keep` is not positive.
          zmq.ZMQError: the address is taken.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least 1 is needed")
        self._codec = codec
        self._keep = keep
        self._lock = threading.Lock()
        self._versions: dict[int, list[Frame]] = {}
        self._rejections: Counter[str] = Counter()
        self._offenders = Offenders()
        self._waiting: Table[Peer, _Request] = Table()
        self._answered: Table[Peer, int] = Table()
        self._router = Router(address, context, codec.message_limit, outside, high_water=UNDER_WAY)
        self.endpoint = self._router.endpoint

    @property
    def rejections(self) -> dict[str, int]:
        """Rejected requests by reason; safe to read from any thread."""
        with self._lock:
            return dict(self._rejections)

    def publish(self, version: int, params: PyTree) -> None:
        """Offer a version. The arrays are sent without copying them: they must never be written again.

        Args:
          version: higher than all before.
          params: NumPy arrays as the codec's spec says.

        Raises:
          ValueError: the version is not higher, or the parameters are not as the spec says.
        """
        frames = self._codec.encode({"kind": "params", "version": int(version)}, params)[1:]
        with self._lock:
            newest = max(self._versions, default=-1)
            if version <= newest:
                raise ValueError(f"version {version} published after {newest}; a higher one is expected")
            self._versions[int(version)] = frames
            for old in sorted(self._versions)[: -self._keep]:
                del self._versions[old]
        self._router.wake()

    def forget(self) -> None:
        """Offer nothing until the next `publish`, which may be of a lower version."""
        with self._lock:
            self._versions.clear()

    def serve(self, stop: threading.Event) -> None:
        """Answer requests until `stop` is set; run it on one thread."""
        newest = -1
        while not stop.is_set():
            self._router.wait(POLL_SECONDS)
            asking = [peer for peer, frames in self._router.messages(1) if self._take(peer, frames)]
            with self._lock:
                versions = dict(self._versions)
            # A lower one after `forget` is news as well.
            if max(versions, default=-1) != newest:
                newest, asking = max(versions, default=-1), list(self._waiting)
            for peer in asking:
                self._answer(peer, versions)

    def close(self) -> None:
        """Close at once, when `serve` has returned; what has not been sent is dropped."""
        self._router.close()

    def _take(self, peer: Peer, frames: list[zmq.Frame]) -> bool:
        """Note a request; whether there was one."""
        try:
            if self._offenders.cut_off(peer):
                raise Rejected("cut_off", "too many messages rejected")
            request = self._read(frames)
        except Rejected as error:
            with self._lock:
                self._rejections[error.reason] += 1
            # The client raises on an answer of another protocol; one that sends noise gets none.
            if error.reason == "protocol":
                self._router.send(peer, [self._codec.encode_header({"kind": "refused"})])
            if error.reason != "cut_off":
                self._offenders.reject(peer)
            return False
        # On one connection nothing is lost, so a repeat of what has been answered is not answered again.
        if self._answered.get(peer) == request.number:
            return False
        self._waiting[peer] = request
        return True

    def _read(self, frames: list[zmq.Frame]) -> _Request:
        if len(frames) != 1:
            raise Rejected("malformed", f"{len(frames)} frames; 1 is expected")
        header = self._codec.decode_header(frames[0])
        if header["kind"] not in ("newest", "exactly"):
            raise Rejected("malformed", f"kind {header['kind']!r:.40}")
        return _Request(read_int(header, "number"), read_int(header, "version"), header["kind"] == "exactly")

    def _answer(self, peer: Peer, versions: dict[int, list[Frame]]) -> None:
        request, newest = self._waiting.get(peer), max(versions, default=-1)
        if request is None or newest < request.version:
            return
        version = request.version if request.exact else newest
        kind = "params" if version in versions else "gone"
        fields = {"kind": kind, "number": request.number, "version": version, "newest": newest}
        del self._waiting[peer]
        if self._router.send(peer, [self._codec.encode_header(fields), *versions.get(version, [])]):
            self._answered[peer] = request.number
        else:  # it will ask again
            self._answered.pop(peer, None)


class ParameterClient:
    """An actor's end; belongs to one thread.

    It always has one request under way, so that the next version usually is here before it is asked for. Parameters it
    returns are read-only views of the message received.
    """

    def __init__(
        self, address: str, codec: Codec, context: zmq.Context, exact: bool = False, keys: ClientKeys | None = None
    ) -> None:
        """Connect to `address`; the server may come later, and over tcp and ipc also come again.

        Args:
          address: the server's `endpoint`.
          codec: of the same spec and settings as the server's.
          context: the server's own when the address is `inproc://`.
          exact: versions will be asked for with `exactly` (lock-step), otherwise with `newest`.
          keys: for a server that asks for them.
        """
        self.address = address
        self._codec = codec
        self._exact = exact
        self._held: dict[int, PyTree] = {}
        self._asked: _Request | None = None
        self._gone: tuple[int, int] | None = None  # a version not kept any more, and the newest
        # Starts at the clock, so that no earlier client's answers are taken for this one's.
        self._numbers = itertools.count(time.time_ns())
        self._repeat_at = 0.0
        self._socket = open_socket(context, zmq.DEALER, codec.message_limit)
        # Without an identity of its own it is somebody new after a broken connection, whom nothing has been answered.
        connect(self._socket, address, keys)

    def newest(self, at_least: int, stop: threading.Event, timeout: float) -> tuple[int, PyTree] | None:
        """The newest parameters received, waiting only while they are older than `at_least`.

        Returns:
          Version and parameters, or None when `stop` was set.

        Raises:
          TimeoutError: they have not come within `timeout` seconds.
          Rejected: the learner's parameters are not as the spec says.
        """
        if self._exact:
            raise RuntimeError("newest() on a client made with exact=True; use exactly()")
        return self._await(at_least, stop, timeout)

    def exactly(self, version: int, stop: threading.Event, timeout: float) -> tuple[int, PyTree] | None:
        """The parameters of `version`, waiting for them; versions below it are forgotten.

        Returns:
          Version and parameters, or None when `stop` was set.

        Raises:
          VersionGone: the learner does not keep them any more.
          TimeoutError: they have not come within `timeout` seconds.
          Rejected: the learner's parameters are not as the spec says.
        """
        if not self._exact:
            raise RuntimeError("exactly() on a client made with exact=False; use newest()")
        return self._await(version, stop, timeout)

    def poll(self) -> None:
        """Take in what has come and ask for the next, without waiting.

        `newest` does this as well. Called now and then during a long unroll it keeps what `newest` will return fresh:
        without it that is the first version published since the last call, not the last.
        """
        while (frames := receive(self._socket, self._codec.frame_count)) is not None:
            self._take(frames)

    def refetch(self) -> None:
        """Forget the parameters received; for a learner that restarted with a lower version."""
        self._held.clear()
        self._asked = self._gone = None

    def close(self) -> None:
        """Close at once."""
        self._socket.close()

    def _await(self, version: int, stop: threading.Event, timeout: float) -> tuple[int, PyTree] | None:
        deadline = time.monotonic() + timeout
        self.poll()
        while (found := self._find(version)) is None:
            now = time.monotonic()
            if stop.is_set():
                return None
            if self._gone is not None and self._gone[0] == version:
                raise VersionGone(f"{self.address} no longer keeps version {version}, but {self._gone[1]}")
            if now >= deadline:
                raise TimeoutError(f"no parameters of version {version} from {self.address} within {timeout} s")
            self._ask(version)
            self._socket.poll(milliseconds(min(POLL_SECONDS, deadline - now)))
            self.poll()
        for old in [held for held in self._held if held < found]:
            del self._held[old]
        if self._exact and self._asked is None and found + 1 not in self._held:
            self._ask(found + 1)
        return found, self._held[found]

    def _find(self, version: int) -> int | None:
        if self._exact:
            return version if version in self._held else None
        return max((held for held in self._held if held >= version), default=None)

    def _ask(self, version: int) -> None:
        """Have a request under way that brings `version` nearer; repeat it when it was long ago."""
        now, asked = time.monotonic(), self._asked
        if asked is None or asked.version > version or (self._exact and asked.version != version):
            asked = self._asked = _Request(next(self._numbers), version, self._exact)
        elif now < self._repeat_at:
            return
        self._repeat_at = now + REPEAT_SECONDS
        kind = "exactly" if self._exact else "newest"
        header = {"kind": kind, "number": asked.number, "version": asked.version}
        with contextlib.suppress(zmq.Again):  # nobody took the last ones; it will be repeated
            self._socket.send(self._codec.encode_header(header), zmq.NOBLOCK)

    def _take(self, frames: list[zmq.Frame]) -> None:
        header = self._codec.decode_header(frames[0])
        asked = self._asked
        if asked is None or header.get("number") != asked.number:
            return  # the late answer to an earlier request
        self._asked = None
        version = read_int(header, "version")
        if header["kind"] == "gone":
            self._gone = (version, read_int(header, "newest"))
            return
        params = self._codec.decode_payload(header, frames[1:])
        if not self._exact:
            self._held.clear()
            self._ask(version + 1)
        self._held[version] = params


class ParameterRelay:
    """Fetches parameters once for all actors of a host and hands them on, so that the learner sends them once."""

    def __init__(self, upstream: ParameterClient, server: ParameterServer) -> None:
        """
        Args:
          upstream: of the learner; belongs to the thread of `run`.
          server: for the actors here; `server.serve` has a thread of its own.
        """
        self._upstream = upstream
        self._server = server

    def run(self, stop: threading.Event) -> None:
        """Hand on what the learner publishes until `stop` is set.

        Raises:
          Rejected: the learner's parameters are not as the spec says.
        """
        version = -1
        try:
            while not stop.is_set():
                try:
                    found = self._upstream.newest(version + 1, stop, RELAY_SECONDS)
                except TimeoutError:
                    # The learner is busy, away, or another one that begins at an earlier version.
                    self._upstream.refetch()
                    found = self._look(stop)
                if found is None or found[0] == version:
                    continue
                if found[0] < version:
                    self._server.forget()
                version = found[0]
                self._server.publish(version, found[1])
        finally:
            self._upstream.close()

    def _look(self, stop: threading.Event) -> tuple[int, PyTree] | None:
        try:
            return self._upstream.newest(0, stop, RELAY_SECONDS)
        except TimeoutError:
            return None
