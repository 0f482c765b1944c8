"""Keys (CURVE, rfc.zeromq.org/spec/26): who may connect from beyond this host, and to whom.

A folder holds one pair for the learner and one for each actor: `NAME.key` is public, `NAME.key_secret` is not. What is
sent between holders of keys is encrypted; a learner answers only the actors whose public keys are in its folder, an
actor only sends to the learner whose public key is in its own. The key says that a peer is an actor, not which.
"""

import contextlib
import logging
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils import z85

from tianji_jax.transport.peers import Table
from tianji_jax.transport.sockets import ZAP_DOMAIN, milliseconds
from tianji_jax.worker import POLL_SECONDS

logger = logging.getLogger(__name__)

LEARNER = "learner"
"""Name of the learner's pair."""

ACTOR = "actor"
"""Name of the first actor's pair."""

ZAP_ADDRESS = "inproc://zeromq.zap.01"
"""Where libzmq asks whether to let a peer in (rfc.zeromq.org/spec/27)."""

LOOK_SECONDS = 2.0
"""How often a learner looks for the keys of new actors."""

COMPLAINTS_LIMIT = 100
"""Strangers of whom the log tells; further ones go unmentioned while these keep trying."""


class KeyFileError(ValueError):
    """Keys that cannot be made or used; the message names the file and what to do."""


@dataclass(frozen=True)
class ServerKeys:
    """What a learner needs.

    Attributes:
      public: its own key, as Z85 text.
      secret: the other half.
      clients: public keys of its actors.
    """

    public: bytes
    secret: bytes = field(repr=False)
    clients: frozenset[bytes]

    def secure(self, socket: zmq.Socket) -> None:
        """Have a socket that is not bound yet insist on keys; an `Authenticator` says whose."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        # Without an authenticator libzmq would let in every key; with an enforced domain it lets in none.
        socket.zap_domain = ZAP_DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def as_client(self) -> "ClientKeys":
        """For talking to a holder of the same pair, such as another learner of the run."""
        return ClientKeys(self.public, self.secret, self.public)


@dataclass(frozen=True)
class ClientKeys:
    """What an actor needs.

    Attributes:
      public: its own key, as Z85 text.
      secret: the other half.
      server: public key of its learner.
    """

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes

    def secure(self, socket: zmq.Socket) -> None:
        """Have a socket that is not connected yet talk to the holder of the learner's secret key and nobody else."""
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_serverkey = self.server


def connect(socket: zmq.Socket, address: str, keys: ClientKeys | None) -> None:
    """Have a client's socket connect to `address`, with `keys` if the server there asks for them.

    Raises:
      zmq.ZMQError: not an address to connect to.
    """
    if keys is not None:
        keys.secure(socket)
    socket.ipv6 = "[" in address
    socket.connect(address)


class Authenticator:
    """Lets holders of known keys in and nobody else. One in each `zmq.Context`; `run` has a thread of its own."""

    def __init__(
        self, clients: frozenset[bytes], context: zmq.Context, look_again: Callable[[], frozenset[bytes]] | None = None
    ) -> None:
        """
        Args:
          clients: public keys to let in.
          context: of the sockets that the keys are for.
          look_again: gives the keys to let in from now on, and is asked every `LOOK_SECONDS`; None: they stay the same.
        """
        self._clients = {z85.decode(key) for key in clients}
        self._look_again, self._looked = look_again, time.monotonic()
        self._trouble = ""
        self._told: Table[bytes, bool] = Table(COMPLAINTS_LIMIT)
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ZAP_ADDRESS)

    def run(self, stop: threading.Event) -> None:
        """Answer libzmq until `stop` is set."""
        while not stop.is_set():
            if self._socket.poll(milliseconds(POLL_SECONDS)):
                self._answer(self._socket.recv_multipart())
            if self._look_again is not None and time.monotonic() - self._looked >= LOOK_SECONDS:
                self._renew(self._look_again)

    def close(self) -> None:
        """Close, when `run` has returned; nobody is let in any more."""
        self._socket.close()

    def _renew(self, look_again: Callable[[], frozenset[bytes]]) -> None:
        self._looked = time.monotonic()
        try:
            self._clients = {z85.decode(key) for key in look_again()}
        except KeyFileError as error:
            if str(error) != self._trouble:
                logger.warning("security.keys: %s; the keys from before stay in use", error)
            self._trouble = str(error)
        else:
            self._trouble = ""

    def _answer(self, request: list[bytes]) -> None:
        version, number, _, address, _, mechanism, *credentials = request
        known = mechanism == b"CURVE" and credentials[0] in self._clients
        if not known and address not in self._told:
            self._told[address] = True
            logger.warning("%s is not let in: its key is none of the actors'", address.decode(errors="replace"))
        # After 400 a peer would never try again; 300 leaves it without an answer until it gives up and does.
        verdict = (b"200", b"OK", b"actor") if known else (b"300", b"unknown key", b"")
        self._socket.send_multipart([version, number, *verdict, b""])


def make_keys(directory: Path, actor: str | None = None) -> list[Path]:
    """Write the learner's pair and the first actor's, or with `actor` another actor's pair; returns the files.

    They and a new directory are readable by their owner only, from the first byte on.

    Raises:
      KeyFileError: a file exists already, the name will not do, or the directory is open to others.
    """
    names = [LEARNER, ACTOR] if actor is None else [actor]
    if actor == LEARNER or not all(re.fullmatch(r"\w[\w.-]*", name) for name in names):
        raise KeyFileError(f"{actor!r} cannot be an actor's name; letters, digits and _ . - can, but {LEARNER!r}")
    if actor is not None and not (directory / f"{LEARNER}.key").exists():
        raise KeyFileError(f"{directory} has no {LEARNER}.key: begin with `tianji keys new {directory}`")
    files = [directory / f"{name}{suffix}" for name in names for suffix in (".key", ".key_secret")]
    taken = [str(file) for file in files if os.path.lexists(file)]
    if taken:
        raise KeyFileError(f"{', '.join(taken)}: exists already, and is not overwritten")
    with _private():
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(directory, "700")
            for name in names:
                zmq.auth.create_certificates(directory, name)
        except OSError as error:
            raise KeyFileError(f"cannot write to {directory}: {error.strerror}") from None
    return files


def load_server_keys(directory: Path) -> ServerKeys:
    """The learner's pair and the public keys of its actors.

    Raises:
      KeyFileError: one is missing, broken, or a secret that others can read.
    """
    public, secret = _load_pair(directory / f"{LEARNER}.key_secret")
    files = [file for file in sorted(directory.glob("*.key")) if file.name != f"{LEARNER}.key"]
    if not files:
        raise KeyFileError(f"{directory} has no actor's public key (NAME.key), so that nobody could connect")
    return ServerKeys(public, secret, frozenset(_load(file)[0] for file in files))


def load_client_keys(directory: Path) -> ClientKeys:
    """An actor's pair, the first by name when there are several (a learner takes them all), and its learner's key.

    Raises:
      KeyFileError: one is missing, broken, or a secret that others can read.
    """
    files = [file for file in sorted(directory.glob("*.key_secret")) if file.name != f"{LEARNER}.key_secret"]
    if not files:
        raise KeyFileError(f"{directory} has no actor's secret key (NAME.key_secret): {_how_to_make(directory)}")
    public, secret = _load_pair(files[0])
    return ClientKeys(public, secret, _load(directory / f"{LEARNER}.key")[0])


def _load_pair(file: Path) -> tuple[bytes, bytes]:
    if file.exists():
        _check_private(file, "600")
    public, secret = _load(file)
    if secret is None or zmq.curve_public(secret) != public:
        raise KeyFileError(f"{file} does not hold a pair of keys")
    return public, secret


def _load(file: Path) -> tuple[bytes, bytes | None]:
    if not file.exists():
        raise KeyFileError(f"there is no {file}: {_how_to_make(file.parent)}")
    try:
        public, secret = zmq.auth.load_certificate(file)
        for key in (public, *([secret] if secret else [])):
            if len(z85.decode(key)) != 32:
                raise ValueError
    except OSError as error:
        raise KeyFileError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, KeyError, struct.error):
        raise KeyFileError(f"{file} does not hold a key of 40 characters") from None
    return public, secret


def _check_private(path: Path, mode: str) -> None:
    found = stat.S_IMODE(path.stat().st_mode)
    if found & 0o077:
        raise KeyFileError(f"{path} is open to others than its owner (mode {found:o}): chmod {mode} {path}")


def _how_to_make(directory: Path) -> str:
    return f"make keys with `tianji keys new {directory}`, or copy them there"


@contextlib.contextmanager
def _private() -> Iterator[None]:
    """Files made meanwhile are for their owner only; of the whole process, so not for use beside other threads."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
