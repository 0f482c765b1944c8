"""What groups that train together and their root say to each other (DEALER and ROUTER).

A group brings what it has learned, as the change of its parameters since it last took over the root's; the answer has
the root's parameters, which then hold what all groups have brought. It says so once a second that it is there, and is
told how all stand. A root that was started anew knows nobody: each group brings its parameters as they are, and the
first to come gives the root its own.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import zmq

from tianji_jax.transport.codec import Codec, Frame, Header, Rejected, read_int
from tianji_jax.transport.keys import ServerKeys, connect
from tianji_jax.transport.peers import Offenders, Peer
from tianji_jax.transport.sockets import bind, is_loopback, milliseconds, open_socket, receive
from tianji_jax.types import PyTree
from tianji_jax.worker import POLL_SECONDS

BEAT_SECONDS = 1.0
"""Between two signs of life of a group."""

REPEAT_SECONDS = 5.0
"""How long a group waits for an answer before it asks again: the root may be another by now."""

FAREWELL_SECONDS = 1.0
"""How long a group that ends waits for the root to have heard so."""

NAME_LIMIT = 100
"""Characters of a group's name."""


class Progress(NamedTuple):
    """How far a group is.

    Attributes:
      environment_steps: its own, over all its learners.
      window_return: mean return of its last 100 episodes; None before there are so many.
    """

    environment_steps: int
    window_return: float | None


class Together(NamedTuple):
    """How all groups stand.

    Attributes:
      groups: that are there.
      environment_steps: of all, those that are not there any more included.
      elsewhere: the same without those of the group that is told.
      outer_steps: changes that the root has taken in.
      over: the run has reached its end.
      solved: by `run.stop_at_return`.
    """

    groups: int
    environment_steps: int
    elsewhere: int
    outer_steps: int
    over: bool
    solved: bool


class Word(NamedTuple):
    """What a group says.

    Attributes:
      kind: "join" brings parameters as they are, "push" a change of them, "beat" nothing, "end" and "pause" say that
        the group has ended, for good or to go on later.
      group: its name, which nobody else has.
      seed: its `run.seed`.
      number: of what it brings; the same when that is sent again.
      root: which root the change refers to.
      progress: of the group.
      brought: the parameters or their change, float32 arrays; None unless there are any.
    """

    kind: str
    group: str
    seed: int
    number: int
    root: str
    progress: Progress
    brought: PyTree


class Answer(NamedTuple):
    """What the root says.

    Attributes:
      kind: "fused" comes with parameters, "standing" without, "join" asks a group to bring its parameters as they are,
        "refused" says why it cannot take part.
      together: how all groups stand.
      root: a name that no root had before.
      values: the parameters; None unless there are any.
      why: in words.
    """

    kind: str
    together: Together
    root: str
    values: PyTree = None
    why: str = ""


class GroupsRefused(RuntimeError):
    """The root does not take this group; the message is the root's."""


class RootSocket:
    """The root's end; belongs to one thread."""

    def __init__(self, address: str, codec: Codec, context: zmq.Context, keys: ServerKeys | None) -> None:
        """Listen.

        Args:
          address: `tcp://HOST:PORT` by which the groups reach it; beyond loopback it listens on all of this host's.
          codec: of what is fused.
          context: with an `Authenticator`, where there are keys.
          keys: who may connect; None for everybody.

        Raises:
          zmq.ZMQError: the port is taken.
        """
        self._codec = codec
        self._offenders = Offenders()
        self._socket = open_socket(context, zmq.ROUTER, codec.message_limit)
        if keys is not None:
            keys.secure(self._socket)
        port = address.rpartition(":")[2]
        # The name by which others reach this host may be none of its addresses.
        here = address if is_loopback(address) else f"tcp://0.0.0.0:{port}"
        bind(self._socket, here, allow_plaintext=True)  # the caller has seen to keys

    def words(self, answer: Callable[[Word], Answer]) -> int:
        """Answer what has come within `POLL_SECONDS`; returns how many messages were rejected."""
        rejected = 0
        self._socket.poll(milliseconds(POLL_SECONDS))
        while (frames := receive(self._socket, 1 + self._codec.frame_count)) is not None:
            peer = Peer(0, frames[0].bytes)
            if self._offenders.cut_off(peer):
                continue
            try:
                word, refusal = self._read(frames[1:])
            except Rejected:
                rejected += 1
                self._offenders.reject(peer)
                continue
            said = answer(word) if refusal is None else refusal
            self._say(peer, word.number, said)
        return rejected

    def close(self) -> None:
        """Close at once."""
        self._socket.close()

    def _read(self, frames: list[zmq.Frame]) -> tuple[Word, Answer | None]:
        header = self._codec.decode_header(frames[0])
        if header["kind"] not in ("join", "push", "beat", "end", "pause"):
            raise Rejected("malformed", f"kind {header['kind']!r:.40}")
        name, root = header.get("group"), header.get("root")
        if not (isinstance(name, str) and isinstance(root, str) and 0 < len(name) <= NAME_LIMIT):
            raise Rejected("malformed", f"group {name!r:.40} of root {root!r:.40}")
        mean = header.get("window_return")
        if not (mean is None or isinstance(mean, float)):
            raise Rejected("malformed", f"window_return {mean!r:.40}")
        progress = Progress(read_int(header, "environment_steps"), mean)
        word = Word(header["kind"], name, read_int(header, "seed"), read_int(header, "number"), root, progress, None)
        if header.get("fingerprint") != self._codec.fingerprint:
            why = self._codec.difference(str(header.get("description", "")))
            return word, Answer("refused", _NOBODY, "", why=f"its configuration is another: {why}")
        if word.kind in ("join", "push"):
            return word._replace(brought=self._codec.decode_payload(header, frames[1:], finite=True)), None
        return word, None

    def _say(self, peer: Peer, number: int, answer: Answer) -> None:
        header = {"number": number, "kind": answer.kind, "root": answer.root, "why": answer.why}
        header |= answer.together._asdict()
        frames: list[Frame] = [self._codec.encode_header(header)]
        if answer.values is not None:
            frames += self._codec.encode({"kind": "values"}, answer.values)[1:]
        with contextlib.suppress(zmq.ZMQError):  # it is gone, or does not read: it will ask again
            self._socket.send_multipart([peer.identity, *frames], zmq.NOBLOCK, copy=False)


class RootLink:
    """A group's end; belongs to one thread."""

    def __init__(
        self, address: str, codec: Codec, context: zmq.Context, keys: ServerKeys | None, name: str, seed: int
    ) -> None:
        """
        Args:
          address: of the root.
          codec: of what is fused, the same as the root's.
          context: of the process.
          keys: one pair for the root and all groups; None to do without.
          name: of the group, which nobody else has.
          seed: its `run.seed`.
        """
        self._codec, self._about = codec, {"group": name, "seed": seed, "description": codec.description}
        self._socket = open_socket(context, zmq.DEALER, codec.message_limit)
        connect(self._socket, address, None if keys is None else keys.as_client())
        # Starts at the clock, so that no earlier life's answers are taken for this one's.
        self._number = time.time_ns()
        self._root = ""
        self._waiting: list[Frame] = []
        self._repeat_at = self._beat_at = 0.0
        self._progress = Progress(0, None)

    def bring(self, kind: str, brought: PyTree) -> None:
        """Send parameters ("join") or their change ("push"), float32 arrays, until there is an answer."""
        self._number += 1
        self._waiting = self._codec.encode(self._header(kind), brought)
        self._repeat_at = 0.0

    def turn(self, progress: Progress) -> Iterator[Answer]:
        """Say what is to be said, and give what the root has answered within `POLL_SECONDS`.

        Raises:
          Rejected: the answer is not as the spec says.
        """
        self._progress, now = progress, time.monotonic()
        if self._waiting and now >= self._repeat_at:
            self._repeat_at = now + REPEAT_SECONDS
            self._send(self._waiting)
        elif now >= self._beat_at:
            self._send([self._codec.encode_header(self._header("beat"))])
        yield from self._answers(POLL_SECONDS)

    def end(self, progress: Progress, for_good: bool) -> None:
        """Tell the root that this group has ended; waits until it has heard, not long."""
        self._progress, self._waiting = progress, []
        self._number += 1
        self._send([self._codec.encode_header(self._header("end" if for_good else "pause"))])
        deadline = time.monotonic() + FAREWELL_SECONDS
        with contextlib.suppress(Rejected):
            while time.monotonic() < deadline and not any(True for _ in self._answers(POLL_SECONDS)):
                pass

    def close(self) -> None:
        """Close at once."""
        self._socket.close()

    def _header(self, kind: str) -> Header:
        header: dict[str, Any] = {"kind": kind, "number": self._number, "root": self._root, **self._about}
        return header | {"fingerprint": self._codec.fingerprint, **self._progress._asdict()}

    def _send(self, frames: list[Frame]) -> None:
        self._beat_at = time.monotonic() + BEAT_SECONDS
        with contextlib.suppress(zmq.Again):  # nobody takes it; it will be said again
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def _answers(self, seconds: float) -> Iterator[Answer]:
        if not self._socket.poll(milliseconds(seconds)):
            return
        while (frames := receive(self._socket, self._codec.frame_count)) is not None:
            header = self._codec.decode_header(frames[0])
            if header.get("number") != self._number:
                continue  # the late answer to an earlier word
            answer = self._read(header, frames[1:])
            if answer.kind != "standing":
                self._waiting = []
            self._root = answer.root
            yield answer

    def _read(self, header: Header, frames: list[zmq.Frame]) -> Answer:
        if header["kind"] == "refused":
            raise GroupsRefused(f"the root does not take this group: {header.get('why')!s:.2000}")
        together = Together(
            groups=read_int(header, "groups"),
            environment_steps=read_int(header, "environment_steps"),
            elsewhere=read_int(header, "elsewhere"),
            outer_steps=read_int(header, "outer_steps"),
            over=header.get("over") is True,
            solved=header.get("solved") is True,
        )
        values = self._codec.decode_payload(header, frames, finite=True) if header["kind"] == "fused" else None
        return Answer(header["kind"], together, str(header.get("root")), values)


_NOBODY = Together(0, 0, 0, 0, False, False)
