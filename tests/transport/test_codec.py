"""Messages of arrays: whole ones come through as they were, others are turned away before they cost memory."""

import tracemalloc
from typing import Any, NamedTuple

import jax
import ml_dtypes
import msgpack
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tianji_jax.transport.codec import DIFFERENCES_LIMIT, HEADER_LIMIT, PROTOCOL, Codec, Rejected, read_int
from tianji_jax.types import ArraySpec

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [
    np.dtype(name) for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "float16", "float32")
] + [BFLOAT16]
REASONS = {"malformed", "oversized", "protocol", "fingerprint", "shape", "non_finite"}

array_specs = st.builds(ArraySpec, st.lists(st.integers(0, 4), max_size=4).map(tuple), st.sampled_from(DTYPES))
spec_trees = st.recursive(
    array_specs,
    lambda trees: st.dictionaries(st.sampled_from("abcd"), trees, max_size=3) | st.lists(trees, max_size=3).map(tuple),
    max_leaves=6,
)


class Pair(NamedTuple):
    first: Any
    second: Any


def random_tree(spec: Any, seed: int) -> Any:
    rng = np.random.default_rng(seed)

    def draw(leaf: ArraySpec) -> np.ndarray:
        if leaf.dtype == bool:
            return rng.integers(0, 2, leaf.shape).astype(bool)
        return np.asarray(rng.integers(0, 100, leaf.shape)).astype(leaf.dtype)

    return jax.tree.map(draw, spec)


def on_the_wire(frames: list[Any]) -> list[bytes]:
    return [bytes(memoryview(frame)) for frame in frames]


def assert_equal_trees(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tolist() == b.tolist()


def decode_or_reason(codec: Codec, frames: list[bytes]) -> tuple[Any, str]:
    try:
        return codec.decode(frames)[1], ""
    except Rejected as error:
        return None, error.reason


@given(spec=spec_trees, seed=st.integers(0, 2**32 - 1))
def test_any_tree_comes_through_as_it_was(spec: Any, seed: int) -> None:
    codec, tree = Codec(spec, {"run": 1}), random_tree(spec, seed)
    frames = on_the_wire(codec.encode({"kind": "test", "version": 7}, tree))
    header, decoded = Codec(spec, {"run": 1}).decode(frames, finite=True)
    assert (header["kind"], header["version"]) == ("test", 7)
    assert_equal_trees(decoded, tree)
    assert all(frame_size <= codec.message_limit for frame_size in map(len, frames))


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=300)
@given(spec=spec_trees, seed=st.integers(0, 2**32 - 1), data=st.data())
def test_a_mutated_message_is_rejected_or_decodes_to_what_its_frames_hold(spec: Any, seed: int, data: Any) -> None:
    codec, tree = Codec(spec, {"run": 1}), random_tree(spec, seed)
    original = on_the_wire(codec.encode({"kind": "test", "version": 7}, tree))
    frames = list(original)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, max(0, len(frames) - 1)))
        match data.draw(st.sampled_from(["drop", "repeat", "cut", "grow", "flip", "replace"])) if frames else "none":
            case "drop":
                del frames[place]
            case "repeat":
                frames.insert(place, frames[place])
            case "cut":
                frames[place] = frames[place][: data.draw(st.integers(0, len(frames[place])))]
            case "grow":
                frames[place] += data.draw(st.binary(max_size=8))
            case "flip" if frames[place]:
                position = data.draw(st.integers(0, len(frames[place]) - 1))
                flipped = bytearray(frames[place])
                flipped[position] ^= data.draw(st.integers(1, 255))
                frames[place] = bytes(flipped)
            case "replace":
                frames[place] = data.draw(st.binary(max_size=64))
    decoded, reason = decode_or_reason(codec, frames)
    if reason:
        assert reason in REASONS
        return
    leaves = jax.tree.leaves(decoded)
    assert [leaf.tobytes() for leaf in leaves] == frames[1:]
    assert [(leaf.shape, leaf.dtype) for leaf in leaves] == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(spec)]
    if frames[1:] == original[1:]:
        assert_equal_trees(decoded, tree)


@given(frames=st.lists(st.binary(max_size=64), max_size=5))
def test_noise_is_rejected(frames: list[bytes]) -> None:
    codec = Codec({"x": ArraySpec((3,), np.dtype(np.float32))}, {"run": 1})
    with pytest.raises(Rejected) as caught:
        codec.decode(frames)
    assert caught.value.reason in REASONS


def test_contiguous_arrays_are_not_copied_on_either_side() -> None:
    codec = Codec(ArraySpec((100, 100), np.dtype(np.float32)), {"run": 1})
    array = np.arange(10_000, dtype=np.float32).reshape(100, 100)
    frames = codec.encode({"kind": "test"}, array)
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), array)
    _, decoded = codec.decode(frames)
    assert np.shares_memory(decoded, array)
    assert not decoded.flags.writeable
    assert array.flags.writeable


def test_other_memory_layouts_travel_in_c_order() -> None:
    codec = Codec(Pair(ArraySpec((3, 4), np.dtype(np.int32)), ArraySpec((2, 5), np.dtype(np.int32))), {"run": 1})
    tree = Pair(np.arange(12, dtype=np.int32).reshape(4, 3).T, np.arange(20, dtype=np.int32).reshape(2, 10)[:, ::2])
    _, decoded = codec.decode(on_the_wire(codec.encode({"kind": "test"}, tree)))
    assert_equal_trees(decoded, tree)


def test_the_wire_is_little_endian() -> None:
    codec = Codec(ArraySpec((2,), np.dtype(np.int32)), {"run": 1})
    frames = on_the_wire(codec.encode({"kind": "test"}, np.array([1, -2], np.int32)))
    assert frames[1] == bytes([1, 0, 0, 0, 0xFE, 0xFF, 0xFF, 0xFF])


def test_unaligned_frames_decode_to_aligned_arrays() -> None:
    codec = Codec(ArraySpec((8,), np.dtype(np.float32)), {"run": 1})
    frames = on_the_wire(codec.encode({"kind": "test"}, np.arange(8, dtype=np.float32)))
    shifted = memoryview(bytearray(b"." + frames[1]))[1:]
    _, decoded = codec.decode([frames[0], shifted])
    assert decoded.flags.aligned
    assert decoded.tolist() == list(range(8))


def test_frames_of_zeromq_are_understood() -> None:
    codec = Codec(ArraySpec((3,), BFLOAT16), {"run": 1})
    array = np.array([1, 2, 3], BFLOAT16)
    _, decoded = codec.decode([zmq.Frame(frame) for frame in codec.encode({"kind": "test"}, array)])
    assert_equal_trees(decoded, array)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_rejected_where_asked_for(dtype: np.dtype, value: float) -> None:
    codec = Codec({"good": ArraySpec((2,), dtype), "reward": ArraySpec((5,), dtype)}, {"run": 1})
    reward = np.zeros(5, dtype)
    reward[3] = value
    frames = codec.encode({"kind": "test"}, {"good": np.ones(2, dtype), "reward": reward})
    codec.decode(frames)
    with pytest.raises(Rejected, match="reward") as caught:
        codec.decode(frames, finite=True)
    assert caught.value.reason == "non_finite"


def test_bytes_that_are_no_bools_are_rejected() -> None:
    codec = Codec({"valid": ArraySpec((3,), np.dtype(bool))}, {"run": 1})
    header = codec.encode_header({"kind": "test"})
    assert codec.decode([header, bytes([0, 1, 0])])[1]["valid"].tolist() == [False, True, False]
    with pytest.raises(Rejected, match="valid") as caught:
        codec.decode([header, bytes([0, 1, 2])])
    assert caught.value.reason == "malformed"


def test_each_fault_has_its_reason() -> None:
    spec = {"x": ArraySpec((3,), np.dtype(np.float32))}
    codec = Codec(spec, {"run": 1})
    frames = on_the_wire(codec.encode({"kind": "test"}, {"x": np.zeros(3, np.float32)}))

    def header(**entries: Any) -> bytes:
        return msgpack.packb({**msgpack.unpackb(frames[0]), **entries})

    faults = {
        "malformed": [[], frames[:1], [*frames, b""], [b"\xc1", frames[1]], [header(kind=3), frames[1]]],
        "oversized": [[b"\0" * (HEADER_LIMIT + 1), frames[1]]],
        "protocol": [[header(protocol=PROTOCOL + 1), frames[1]]],
        "fingerprint": [[header(fingerprint="other"), frames[1]], [header(fingerprint=None), frames[1]]],
        "shape": [[frames[0], b"\0" * 11], [frames[0], b"\0" * 13]],
    }
    for reason, messages in faults.items():
        for message in messages:
            with pytest.raises(Rejected) as caught:
                codec.decode(message)
            assert caught.value.reason == reason


@pytest.mark.parametrize(
    "bomb",
    [
        b"\xdd\xff\xff\xff\xff" * 200,  # arrays in arrays, each claiming 2^32 - 1 entries
        (b"\xdd\x00\x03\xf0\x00" * 50).ljust(HEADER_LIMIT, b"\0"),  # claims no more than the header has bytes
        b"\xdf\xff\xff\xff\xff" * 200,
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\xc9\xff\xff\xff\xff\x01",
    ],
    ids=["arrays", "smaller arrays", "maps", "string", "nesting", "extension"],
)
def test_what_a_header_claims_takes_no_memory(bomb: bytes) -> None:
    codec = Codec(ArraySpec((), np.dtype(bool)), {"run": 1})
    tracemalloc.start()
    try:
        with pytest.raises(Rejected, match="malformed"):
            codec.decode([bomb, b"\0"])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * HEADER_LIMIT


@pytest.mark.parametrize("value", [-1, 2**63, 1.0, True, "1", None, [1]])
def test_numbers_of_a_header_are_checked(value: object) -> None:
    with pytest.raises(Rejected, match="version") as caught:
        read_int({"version": value}, "version")
    assert caught.value.reason == "malformed"
    assert read_int({"version": 2**63 - 1}, "version") == 2**63 - 1


def test_a_tree_that_is_not_as_the_spec_says_is_refused_with_its_name() -> None:
    codec = Codec({"reward": ArraySpec((3, 2), np.dtype(np.float32))}, {"run": 1})
    for wrong in [np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float64), [0.0], np.zeros((3, 2), ">f4")]:
        with pytest.raises(ValueError, match=r"reward.*float32"):
            codec.encode({"kind": "test"}, {"reward": wrong})
    with pytest.raises(ValueError, match="reward"):
        codec.encode({"kind": "test"}, {"other": np.zeros((3, 2), np.float32)})


def test_a_spec_that_cannot_travel_is_refused() -> None:
    for leaf in [ArraySpec((), np.dtype(np.float64)), ArraySpec((), np.dtype(object)), 3]:
        with pytest.raises(ValueError, match=r"state.*float32"):
            Codec({"state": leaf}, {"run": 1})


def test_a_header_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match=str(HEADER_LIMIT)):
        Codec((), {"run": 1}).encode_header({"kind": "test", "text": "x" * HEADER_LIMIT})


def test_fingerprints_tell_apart_what_must_not_be_mixed() -> None:
    def spec(*shape: int, dtype: Any = np.float32, name: str = "x") -> Any:
        return {name: ArraySpec(shape, np.dtype(dtype))}

    codecs = [
        Codec(spec(3), {"run": 1}),
        Codec(spec(3), {"run": 2}),
        Codec(spec(3, 1), {"run": 1}),
        Codec(spec(3, dtype=np.int32), {"run": 1}),
        Codec(spec(3, name="y"), {"run": 1}),
        Codec({**spec(3), **spec(3, name="y")}, {"run": 1}),
    ]
    assert len({codec.fingerprint for codec in codecs}) == len(codecs)
    assert Codec(spec(3), {"run": 1}).fingerprint == codecs[0].fingerprint
    assert codecs[0].difference(codecs[0].description) == ""


def test_a_difference_is_told_in_words() -> None:
    def description(*shape: int, **settings: Any) -> str:
        return Codec({"x": ArraySpec(shape, np.dtype(np.float32))}, settings).description

    ours = Codec({"x": ArraySpec((3,), np.dtype(np.float32))}, {"unroll": 32, "name": "ppo"})
    assert ours.difference(description(3, unroll=32, name="ppo")) == ""
    assert ours.difference(description(3, unroll=16, name="ppo")) == "unroll: 16 where the learner has 32"
    # Arrays follow from the settings, and are only named when those are the same.
    assert ours.difference(description(4, unroll=16, name="ppo")) == "unroll: 16 where the learner has 32"
    assert ours.difference(description(4, unroll=32, name="ppo")) == (
        "['x']: float32[4] where the learner has float32[3]"
    )
    assert ours.difference(description(3, unroll=32, name="a\nb", clip=[1, 2])) == (
        'name: "a\\nb" where the learner has "ppo"; clip: [1, 2] where the learner has none'
    )
    assert "unroll: none where the learner has 32" in ours.difference(description(3))
    many = ours.difference(description(3, **{f"s{i}": i for i in range(50)}))
    assert many.endswith("and 42 more")
    assert many.count(";") == DIFFERENCES_LIMIT


@given(text=st.text(max_size=2000))
def test_whatever_a_peer_says_of_itself_ends_as_one_short_printable_line(text: str) -> None:
    ours = Codec({"x": ArraySpec((3,), np.dtype(np.float32))}, {"unroll": 32})
    assert ours.difference(text).isprintable()
    assert len(ours.difference(text)) < 600 * DIFFERENCES_LIMIT


def test_a_description_too_long_for_a_header_is_cut_but_still_counts() -> None:
    first, second = (Codec((), {"a": "x" * HEADER_LIMIT, "b": value}) for value in (1, 2))
    assert first.fingerprint != second.fingerprint
    first.encode_header({"kind": "hello", "description": first.description})
