"""Pytrees of NumPy arrays as multipart messages: a small msgpack header, then one frame per array.

Both sides know the specs of the arrays, so that nothing a peer sends decides how much memory is taken: what does not
fit is rejected before it is unpacked. Nothing is ever pickled. On the wire numbers are little-endian and arrays are in
C order. The payload carries no checksum: TCP's and, beyond one host, the encryption's own are there for that.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import ml_dtypes
import msgpack
import numpy as np
import zmq

from tianji_jax.types import ArraySpec, PyTree

PROTOCOL = 1
"""Version of the message layout; raised by every change that an older peer would not understand."""

HEADER_LIMIT = 256 * 1024
"""Largest header in bytes."""

HEADER_ENTRIES = 64
"""Most entries of a map or an array in a header. Small, because msgpack reserves what a length only claims."""

DESCRIPTION_LIMIT = HEADER_LIMIT // 2
"""Most bytes of a description that are sent; what is beyond is in the fingerprint, but cannot be named."""

DIFFERENCES_LIMIT = 10
"""Most differences that are named in one message."""

VALUE_LIMIT = 200
"""Most characters of a peer's words that are repeated in a message."""

DTYPES = frozenset(
    np.dtype(name)
    for name in (
        *(bool, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32),
        *(np.float16, np.float32, ml_dtypes.bfloat16),
    )
)
"""What arrays may hold."""

_ARRAYS = "[arrays]"

Header: TypeAlias = dict[str, Any]
Frame: TypeAlias = bytes | memoryview | zmq.Frame


class Rejected(ValueError):
    """A message that is not taken.

    Attributes:
      reason: one stable word to count by: "malformed" (not the layout it should have), "oversized" (beyond a size
        limit), "protocol" (another version of the layout), "fingerprint" (the sender has other settings or specs),
        "shape" (a frame is not the size of its array), "non_finite", "unknown" (the sender has not said hello),
        "replaced" (another has since, under the same id), "actor_id" (one that the sender may not have), "replayed",
        "uncredited" (a trajectory nobody gave permission for) or "cut_off" (too much from the sender was rejected).
      detail: what was found and what is allowed.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class _Leaf(NamedTuple):
    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    wire_dtype: np.dtype
    nbytes: int


class Codec:
    """Encodes and decodes one kind of pytree.

    A wrong shape or dtype is caught by the fingerprint, which hashes the path, dtype and shape of every leaf together
    with the settings of the run. That is as strict as a descriptor per array in every header, and costs no time per
    message; to tell people *what* differs, peers exchange `description` once, in their handshake.

    Attributes:
      spec: pytree of `ArraySpec`.
      fingerprint: what both sides must have in common, 16 hexadecimal digits.
      description: one line per setting and, below a heading, one per leaf; cut at `DESCRIPTION_LIMIT` bytes.
      frame_count: frames of a message with payload.
      message_limit: size in bytes of the largest frame (`ZMQ_MAXMSGSIZE` counts frames, not multipart messages).
    """

    def __init__(self, spec: PyTree, settings: Mapping[str, Any], narrow: bool = False) -> None:
        """A codec for trees as `spec` says.

        Args:
          spec: pytree of `ArraySpec`.
          settings: everything else both sides must agree on (environment, agent ...), as JSON knows values.
          narrow: float32 travels rounded to bfloat16, in half the bytes.

        Raises:
          ValueError: a leaf is no `ArraySpec` or its dtype does not travel.
        """
        leaves, treedef = jax.tree_util.tree_flatten_with_path(spec)
        self._treedef: Any = treedef  # jax's type stubs do not tell its methods
        self._leaves = [_leaf(jax.tree_util.keystr(path), leaf, narrow) for path, leaf in leaves]
        self.spec = spec
        lines = [f"{name}: {json.dumps(value, sort_keys=True)}" for name, value in settings.items()]
        lines += [_ARRAYS, *(f"{leaf.path}: {ArraySpec(leaf.shape, leaf.wire_dtype)}" for leaf in self._leaves)]
        description = "\n".join(lines).encode()
        self.description = description[:DESCRIPTION_LIMIT].decode(errors="ignore")
        self.fingerprint = hashlib.sha256(b"%d\n%s" % (PROTOCOL, description)).hexdigest()[:16]
        self.frame_count = 1 + len(self._leaves)
        self.message_limit = max([HEADER_LIMIT, *(leaf.nbytes for leaf in self._leaves)])

    def encode_header(self, header: Header) -> bytes:
        """One frame with `header`, which must have a `kind`, and holds strings, bytes, numbers and small dicts.

        Raises:
          ValueError: the header is larger than `HEADER_LIMIT`.
        """
        packed: bytes = msgpack.packb({"protocol": PROTOCOL, "fingerprint": self.fingerprint, **header})
        if len(packed) > HEADER_LIMIT:
            raise ValueError(f"header of {len(packed)} bytes; at most {HEADER_LIMIT} are allowed")
        return packed

    def encode(self, header: Header, tree: PyTree) -> list[Frame]:
        """The frames of a message; those of arrays contiguous in C order are views of them, not copies.

        Raises:
          ValueError: `tree` is not as the spec says.
        """
        values = self._treedef.flatten_up_to(tree)
        pairs = zip(self._leaves, values, strict=True)
        return [self.encode_header(header), *(_to_frame(leaf, value) for leaf, value in pairs)]

    def decode_header(self, frame: Frame) -> Header:
        """The header of a message, with its protocol and kind checked; its fingerprint is checked with the payload.

        Raises:
          Rejected: "oversized", "malformed" or "protocol".
        """
        packed = _view(frame)
        if packed.nbytes > HEADER_LIMIT:
            raise Rejected("oversized", f"header of {packed.nbytes} bytes; at most {HEADER_LIMIT} are allowed")
        try:
            header = msgpack.unpackb(packed, max_array_len=HEADER_ENTRIES, max_map_len=HEADER_ENTRIES)
        except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
            raise Rejected("malformed", f"header is not msgpack: {type(error).__name__} {error}") from error
        if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
            raise Rejected("malformed", "header is not a map with a kind")
        if header.get("protocol") != PROTOCOL:
            raise Rejected("protocol", f"protocol {header.get('protocol')!r:.20}; here it is {PROTOCOL}")
        return header

    def decode_payload(self, header: Header, frames: Sequence[Frame], finite: bool = False) -> PyTree:
        """The tree in `frames` (those after the header) as read-only NumPy arrays that view the frames.

        Only arrays that do not lie aligned in memory are copied; those are of a few kilobytes, out of ZeroMQ's receive
        buffer.

        Args:
          header: from `decode_header`.
          frames: one per leaf.
          finite: reject infinite and not-a-number values.

        Raises:
          Rejected: "fingerprint", "malformed", "shape" or "non_finite".
        """
        if header.get("fingerprint") != self.fingerprint:
            theirs = header.get("fingerprint")
            raise Rejected("fingerprint", f"fingerprint {theirs!r:.40}; here it is {self.fingerprint!r}")
        if len(frames) != len(self._leaves):
            raise Rejected("malformed", f"{len(frames)} arrays; {len(self._leaves)} are expected")
        arrays = [_to_array(leaf, frame) for leaf, frame in zip(self._leaves, frames, strict=True)]
        if finite:
            for leaf, array in zip(self._leaves, arrays, strict=True):
                if leaf.dtype.kind not in "biu" and not np.isfinite(array).all():
                    raise Rejected("non_finite", f"{leaf.path} has a value that is not finite")
        return self._treedef.unflatten(arrays)

    def decode(self, frames: Sequence[Frame], finite: bool = False) -> tuple[Header, PyTree]:
        """Header and tree of a message; see `decode_header` and `decode_payload`.

        Raises:
          Rejected: the message is not one that `encode` of the same specs can have made.
        """
        if len(frames) != self.frame_count:
            raise Rejected("malformed", f"{len(frames)} frames; {self.frame_count} are expected")
        header = self.decode_header(frames[0])
        return header, self.decode_payload(header, frames[1:], finite)

    def difference(self, description: str) -> str:
        """In words, where an actor's `description` differs from this one, the learner's; empty where it does not.

        Arrays are compared only where all settings are the same: they follow from them.
        """
        for ours, theirs in zip(_parse(self.description), _parse(description), strict=True):
            names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
            if names:
                told = [
                    f"{_printable(name)}: {_printable(theirs.get(name, 'none'))} "
                    f"where the learner has {_printable(ours.get(name, 'none'))}"
                    for name in names[:DIFFERENCES_LIMIT]
                ]
                more = len(names) - len(told)
                return "; ".join([*told, *([f"and {more} more"] if more else [])])
        return ""


def read_int(header: Header, name: str) -> int:
    """The entry `name` of a header, an integer from 0 to 2^63 - 1.

    Raises:
      Rejected: "malformed".
    """
    value = header.get(name)
    if type(value) is not int or not 0 <= value < 2**63:
        raise Rejected("malformed", f"{name} is {value!r:.40}; an integer from 0 to 2^63 - 1 is expected")
    return value


def _parse(description: str) -> tuple[dict[str, str], dict[str, str]]:
    """Settings and arrays by name."""
    settings, _, arrays = description.partition(_ARRAYS)
    return _by_name(settings), _by_name(arrays)


def _by_name(lines: str) -> dict[str, str]:
    pairs = (line.partition(": ") for line in lines.split("\n") if line)
    return {name: value for name, _, value in pairs}


def _printable(text: str) -> str:
    """A peer's words as they may go into a log: short, and without control characters."""
    return "".join(c if c.isprintable() else "?" for c in text[:VALUE_LIMIT])


def _view(frame: Any) -> memoryview:
    return memoryview(frame)  # a zmq.Frame is a buffer, which type checkers only know from Python 3.12 on


def _leaf(path: str, spec: object, narrow: bool) -> _Leaf:
    if not isinstance(spec, ArraySpec) or spec.dtype not in DTYPES:
        allowed = ", ".join(sorted(map(str, DTYPES)))
        raise ValueError(f"{path or 'spec'} is {spec}; an ArraySpec of one of {allowed} is expected")
    dtype = np.dtype(ml_dtypes.bfloat16) if narrow and spec.dtype == np.float32 else spec.dtype
    return _Leaf(path, spec.shape, spec.dtype, dtype.newbyteorder("<"), ArraySpec(spec.shape, dtype).nbytes)


def _to_frame(leaf: _Leaf, value: Any) -> memoryview:
    if not isinstance(value, np.ndarray) or value.shape != leaf.shape or value.dtype != leaf.dtype:
        found = f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else type(value).__name__
        raise ValueError(f"{leaf.path} is {found}; a NumPy {leaf.dtype}{list(leaf.shape)} is expected")
    flat = np.asarray(value, dtype=leaf.wire_dtype, order="C").reshape(-1)
    return flat.view(np.uint8).data  # as bytes, because the buffer protocol does not know bfloat16


def _to_array(leaf: _Leaf, frame: Frame) -> np.ndarray:
    buffer = _view(frame)
    if buffer.nbytes != leaf.nbytes:
        raise Rejected("shape", f"{leaf.path} has {buffer.nbytes} bytes; {leaf.nbytes} are expected")
    if leaf.dtype == bool and np.frombuffer(buffer, np.uint8).max(initial=0) > 1:
        raise Rejected("malformed", f"{leaf.path} has a byte that is neither 0 nor 1")
    array: np.ndarray = np.ndarray(leaf.shape, leaf.wire_dtype, buffer=buffer)
    if not array.flags.aligned:
        array = array.copy()
    array = array.astype(leaf.dtype, copy=False)
    array.flags.writeable = False
    return array
