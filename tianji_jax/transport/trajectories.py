"""The stream of trajectories from actors to a learner, and of credits back (DEALER and ROUTER).

An actor says hello, asks for credits and sends one trajectory per credit. Both directions survive a broken connection:
requests and credits are numbered, so that either side can repeat what it said, and a trajectory lost on the way shows
as a gap in the sequence. A learner that restarted asks the actors it does not know to say hello again.
"""

from collections import deque
from dataclasses import dataclass, field

import zmq

from tianji_jax.transport.codec import Codec, Header, Rejected, read_int
from tianji_jax.transport.events import (
    Arrived,
    Credit,
    Event,
    Joined,
    Lost,
    MessageRejected,
    Requested,
    read_episodes,
    read_seconds,
    read_sent,
)
from tianji_jax.transport.peers import REJECTION_LIMIT, Offenders, Peer, Table
from tianji_jax.transport.router import OUTSIDE, Outside, Router
from tianji_jax.types import PyTree, Stamp

REQUEST_LIMIT = 1024
"""Most credits an actor may ask for at once."""


@dataclass
class _Actor:
    """What a server knows of an actor.

    Attributes:
      peer: its connection, which also tells it from its predecessors of the same id.
      sequence: the next expected.
      requested: credits asked for, as the actor counts.
      granted: credits given, as the actor counts.
      unspent: credits given that no trajectory has used up.
      sent: index and version of credits given that the actor has not told to have received.
    """

    peer: Peer
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
      heard: messages of actors that have joined so far, their repeats included.
    """

    def __init__(self, address: str, codec: Codec, context: zmq.Context, outside: Outside | None = None) -> None:
        """Listen at `address` (`tcp://127.0.0.1:*` chooses a port), and at that of `outside`.

        Raises:
          ValueError: not an address to listen at; beyond loopback without keys.
          zmq.ZMQError: the address is taken.
        """
        self._codec = codec
        self._outside_ids = range(0) if outside is None else outside.actor_ids
        self.heard = 0
        self._actors: Table[int, _Actor] = Table()  # one that is forgotten is asked to say hello again
        self._offenders = Offenders()
        self._router = Router(address, context, codec.message_limit, outside)
        self.endpoint = self._router.endpoint

    def poll(self, timeout: float) -> list[Event]:
        """What has happened; empty after `timeout` seconds or a `wake`."""
        self._router.wait(timeout)
        events: list[Event] = []
        for peer, frames in self._router.messages(self._codec.frame_count):
            self._take(peer, frames, events)
        return events

    def grant(self, actor_id: int, credit: Credit) -> bool:
        """Give an actor one credit; False when it is not there to take it (its request then stands no more)."""
        actor = self._actors.get(actor_id)
        if actor is None:
            return False
        if not self._send_credit(actor, actor.granted + 1, credit.version):
            actor.requested = max(actor.granted, actor.requested - 1)  # it will ask again when it is back
            return False
        actor.granted += 1
        actor.unspent += 1
        actor.sent.append((actor.granted, credit.version))
        return True

    def refetch(self, actor_id: int) -> bool:
        """Tell an actor to fetch parameters anew (its stamp is from the future: this learner restarted from an
        earlier version); False when it is not there."""
        actor = self._actors.get(actor_id)
        return actor is not None and self._say(actor.peer, {"kind": "refetch"})

    def reaches(self, actor_id: int) -> bool:
        """Whether an actor is connected; it may hang all the same."""
        actor = self._actors.get(actor_id)
        return actor is not None and self._say(actor.peer, {"kind": "welcome"})

    def wake(self) -> None:
        """Make the `poll` in progress, or else the next, return at once; callable from any thread."""
        self._router.wake()

    def close(self) -> None:
        """Close at once; what has not been sent is dropped."""
        self._router.close()

    def _take(self, peer: Peer, frames: list[zmq.Frame], events: list[Event]) -> None:
        if self._offenders.cut_off(peer):
            events.append(MessageRejected(None, "cut_off", "it is not listened to any more", spent=False))
            return
        actor_id, actor, unspent = peer.actor_id, None, 0
        try:
            if actor_id is None or not frames:
                raise Rejected("malformed", f"message of {len(frames)} frames from {peer.identity!r:.40}")
            header = self._codec.decode_header(frames[0])
            self._check_door(actor_id, peer)
            if header["kind"] == "hello":
                self._on_hello(actor_id, peer, header, events)
            else:
                actor = self._known(actor_id, peer, header)
                unspent = actor.unspent
                self._on_message(actor_id, actor, header, frames[1:], events)
        except Rejected as error:
            spent = actor is not None and actor.unspent < unspent
            # An id that is merely claimed is not told: who keeps accounts by id would keep one for every invention.
            events.append(MessageRejected(actor_id if actor else None, error.reason, error.detail, spent))
            self._on_rejection(peer, error, events)

    def _check_door(self, actor_id: int, peer: Peer) -> None:
        if (actor_id in self._outside_ids) != (peer.door == OUTSIDE):
            ids = self._outside_ids
            may = f"{ids.start} to {ids.stop - 1} may" if ids else "none may"
            raise Rejected("actor_id", f"actor id {actor_id} may not come from there; from outside {may}")

    def _known(self, actor_id: int, peer: Peer, header: Header) -> _Actor:
        actor = self._actors.get(actor_id)
        if actor is None:
            raise Rejected("unknown", f"{header['kind']!r:.40} from an actor that has not said hello")
        if actor.peer != peer:
            raise Rejected("replaced", f"another actor {actor_id} has said hello since")
        self.heard += 1
        return actor

    def _on_rejection(self, peer: Peer, error: Rejected, events: list[Event]) -> None:
        """Answer, and take back what a peer had that is not listened to any more."""
        if self._offenders.reject(peer):
            limit = f"{REJECTION_LIMIT} messages more were rejected than trajectories taken; the last is {error}"
            self._say(peer, {"kind": "refused", "message": limit})
            actor_id = peer.actor_id
            actor = None if actor_id is None else self._actors.get(actor_id)
            if actor_id is not None and actor is not None and actor.peer == peer:
                del self._actors[actor_id]
                if actor.unspent:
                    events.append(Lost(actor_id, actor.unspent))
        elif error.reason == "unknown":
            self._say(peer, {"kind": "unknown"})
        elif error.reason in ("fingerprint", "protocol", "actor_id", "replaced"):
            self._say(peer, {"kind": "refused", "message": error.detail})

    def _on_hello(self, actor_id: int, peer: Peer, header: Header, events: list[Event]) -> None:
        if header.get("fingerprint") != self._codec.fingerprint:
            difference = self._codec.difference(str(header.get("description")))
            raise Rejected("fingerprint", f"actor {actor_id}'s configuration does not fit the learner's: {difference}")
        received, sequence = read_int(header, "received"), read_int(header, "sequence")
        known = self._actors.get(actor_id)
        if known is None or known.peer != peer:
            self._actors[actor_id] = _Actor(peer, sequence, requested=received, granted=received)
            events.append(Joined(actor_id))
        self.heard += 1
        self._say(peer, {"kind": "welcome"})

    def _on_message(
        self, actor_id: int, actor: _Actor, header: Header, payload: list[zmq.Frame], events: list[Event]
    ) -> None:
        received = read_int(header, "received")
        while actor.sent and actor.sent[0][0] <= received:
            actor.sent.popleft()
        if header["kind"] == "request":
            sequence, requested = read_int(header, "sequence"), read_int(header, "requested")
            requests = self._on_request(actor_id, actor, requested)
            # What it sent before came before, or never will.
            lost = min(sequence - actor.sequence, actor.unspent)
            if lost > 0:
                actor.sequence += lost
                actor.unspent -= lost
                events.append(Lost(actor_id, lost))
            events += requests
        elif header["kind"] == "trajectory":
            self._on_trajectory(actor_id, actor, header, payload, events)
        else:
            raise Rejected("malformed", f"kind {header['kind']!r:.40}")

    def _on_request(self, actor_id: int, actor: _Actor, requested: int) -> list[Event]:
        new = requested - actor.requested
        if new > REQUEST_LIMIT:
            raise Rejected("malformed", f"{new} credits asked for at once; at most {REQUEST_LIMIT} are allowed")
        if new <= 0:  # a repeat: what was granted may be lost
            for index, version in actor.sent:
                self._send_credit(actor, index, version)
            return []
        actor.requested = requested
        return [Requested(actor_id)] * new

    def _on_trajectory(
        self, actor_id: int, actor: _Actor, header: Header, payload: list[zmq.Frame], events: list[Event]
    ) -> None:
        sequence = read_int(header, "sequence")
        if sequence < actor.sequence:
            raise Rejected("replayed", f"sequence {sequence} again; {actor.sequence} is expected")
        if not actor.unspent:
            actor.sequence = sequence + 1
            raise Rejected("uncredited", f"sequence {sequence} of an actor without credit")
        lost = min(sequence - actor.sequence, actor.unspent - 1)
        if lost:
            events.append(Lost(actor_id, lost))
        actor.sequence = sequence + 1
        actor.unspent -= lost + 1
        stamp = Stamp(read_int(header, "version"), actor_id, sequence)
        episodes, seconds, sent = read_episodes(header), read_seconds(header), read_sent(header)
        trajectory: PyTree = self._codec.decode_payload(header, payload, finite=True)
        self._offenders.forgive(actor.peer)
        events.append(Arrived(actor_id, stamp, trajectory, episodes, seconds, sent))

    def _send_credit(self, actor: _Actor, index: int, version: int) -> bool:
        return self._say(actor.peer, {"kind": "credit", "index": index, "version": version})

    def _say(self, peer: Peer, fields: Header) -> bool:
        return self._router.send(peer, [self._codec.encode_header(fields)])
