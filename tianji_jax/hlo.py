"""What a compiled program moves: through the memory of its device, and to other devices.

Read off the text of the optimised HLO (`compiled.as_text()`). An instruction reads its operands and writes its result;
one that takes a slice moves the slice only; a fusion moves what goes in and out of it. That is how XLA's
`HloCostAnalysis` counts, with two differences: the body of a loop counts as often as the loop runs, and arrays that
XLA keeps on the chip (memory spaces other than the first) do not count.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")

_BYTES = {"pred": 1, "token": 0, "opaque": 0}
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "add-dependency",
    "opt-barrier",
    "partition-id",
    "replica-id",
}
_ALIASES = {"bitcast", "reshape", "get-tuple-element", "opt-barrier"}
_SLICES = {"dynamic-slice", "slice", "gather"}

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclass
class Traffic:
    """Of one device, in one call.

    Attributes:
      memory: bytes read from and written to its memory.
      payload: bytes of what collectives reduce, gather or exchange, by HLO's name of them.
      collectives: how many there are.
    """

    memory: float = 0.0
    payload: Counter[str] = field(default_factory=Counter)
    collectives: int = 0

    def add(self, other: "Traffic", times: int = 1) -> None:
        """Count `other` too, `times` over."""
        self.memory += times * other.memory
        self.payload.update({op: times * size for op, size in other.payload.items()})
        self.collectives += times * other.collectives


def traffic(text: str) -> Traffic:
    """What a program moves, from the text of its optimised HLO."""
    module = _parse(text)
    return _of_computation(module, next(c for c in module.values() if c.entry))


def padded_bytes(
    dims: tuple[int, ...], item_bytes: float, major_to_minor: tuple[int, ...], tile: tuple[int, ...]
) -> float:
    """Memory of an array whose last dimensions, in the order of its layout, are padded to whole tiles."""
    sizes = [dims[axis] for axis in major_to_minor]
    for axis, size in zip(range(-1, -len(tile) - 1, -1), reversed(tile), strict=True):
        if -axis <= len(sizes):
            sizes[axis] = -(-sizes[axis] // size) * size
    return math.prod(sizes) * item_bytes


@dataclass(frozen=True)
class _Array:
    bytes: float
    in_memory: bool

    @property
    def moved(self) -> float:
        return self.bytes if self.in_memory else 0.0


@dataclass
class _Instruction:
    name: str
    op: str
    type: str
    operands: list[str]
    attributes: str

    @property
    def arrays(self) -> list[_Array]:
        return [_array(*match.groups()) for match in _ARRAY.finditer(self.type)]

    @property
    def called(self) -> list[str]:
        names = _CALLED.findall(self.attributes)
        for branches in _BRANCHES.findall(self.attributes):
            names += re.findall(r"%?([\w.\-]+)", branches)
        return names


@dataclass
class _Computation:
    entry: bool
    instructions: dict[str, _Instruction] = field(default_factory=dict)
    root: str = ""

    def users(self, name: str) -> Iterator[_Instruction]:
        return (instruction for instruction in self.instructions.values() if name in instruction.operands)

    def parameter(self, index: int) -> _Instruction | None:
        for instruction in self.instructions.values():
            if instruction.op == "parameter" and instruction.attributes.startswith(f"{index})"):
                return instruction
        return None


_Module = dict[str, _Computation]


def _array(dtype: str, dims: str, layout: str | None) -> _Array:
    order, _, rest = (layout or "").partition(":")
    sizes = tuple(int(n) for n in dims.split(",") if n)
    minor_to_major = tuple(int(n) for n in order.split(",") if n) or tuple(range(len(sizes)))[::-1]
    tile = re.search(r"T\(([\d,]+)\)", rest)
    space = re.search(r"S\((\d+)\)", rest)
    # A scalar's tile is one that no other shares: nothing to count.
    tiles = tuple(int(n) for n in tile[1].split(",")) if tile and sizes else ()
    size = padded_bytes(sizes, _item_bytes(dtype), minor_to_major[::-1], tiles)
    return _Array(size, space is None or space[1] == "0")


def _item_bytes(dtype: str) -> float:
    if dtype in _BYTES:
        return _BYTES[dtype]
    bits = re.match(r"[a-z]+(\d+)", dtype)
    return int(bits[1]) / 8 if bits else 0


def _parse(text: str) -> _Module:
    module: _Module = {}
    computation = None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            computation = module[header[2]] = _Computation(bool(header[1]))
        elif line.startswith("}"):
            computation = None
        elif computation is not None and (match := _INSTRUCTION.match(line)):
            instruction = _instruction(match[2], match[3])
            computation.instructions[match[2]] = instruction
            if match[1]:
                computation.root = match[2]
    return module


def _instruction(name: str, text: str) -> _Instruction:
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    kind, rest = text[:end], text[end:].lstrip()
    op, _, _ = rest.partition("(")
    close = _closing(rest, len(op))
    inside = rest[len(op) + 1 : close - 1]
    operands = re.findall(r"%([\w.\-]+)", inside)
    # A parameter's operand is its number.
    attributes = f"{inside})" if op == "parameter" else rest[close:]
    return _Instruction(name, op, kind, operands, attributes)


def _closing(text: str, start: int) -> int:
    """Just after the bracket that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index + 1
    return len(text)


def _of_computation(module: _Module, computation: _Computation) -> Traffic:
    total = Traffic()
    for instruction in computation.instructions.values():
        total.add(_of_instruction(module, computation, instruction))
    return total


def _of_instruction(module: _Module, computation: _Computation, instruction: _Instruction) -> Traffic:
    op = instruction.op
    if op == "while":
        trips, total = _TRIPS.search(instruction.attributes), Traffic()
        for name in instruction.called:
            total.add(_of_computation(module, module[name]), int(trips[1]) if trips else 1)
        return total
    if op == "conditional":
        return max((_of_computation(module, module[n]) for n in instruction.called), key=lambda t: t.memory)
    if op in ("call", "async-start"):
        return _of_computation(module, module[instruction.called[0]])
    if op.endswith("-start") or op in ("async-done", "async-update"):
        return Traffic()  # counted where it is done
    total = Traffic(memory=_moved(module, computation, instruction))
    base = op.removesuffix("-done")
    if base in COLLECTIVES:
        result = sum(array.bytes for array in instruction.arrays)
        given = sum(array.bytes for array in _inputs(computation, _begun(computation, instruction)))
        total.payload[base], total.collectives = int(max(result, given)), 1
    if op == "fusion":
        for name in instruction.called:
            inner = _of_computation(module, module[name])
            total.payload.update(inner.payload)
            total.collectives += inner.collectives
    return total


def _begun(computation: _Computation, instruction: _Instruction) -> _Instruction:
    """The instruction itself, or the one that started what it ends."""
    if not instruction.op.endswith("-done"):
        return instruction
    return computation.instructions[instruction.operands[0]]


def _inputs(computation: _Computation, instruction: _Instruction) -> list[_Array]:
    return [array for name in instruction.operands for array in computation.instructions[name].arrays]


def _moved(module: _Module, computation: _Computation, instruction: _Instruction) -> float:
    op = instruction.op.removesuffix("-done")
    if op in _FREE:
        return 0.0
    begun = _begun(computation, instruction)
    inputs = _inputs(computation, begun)
    written = sum(array.moved for array in instruction.arrays)
    if op == "fusion":
        body = module[instruction.called[0]]
        read = sum(
            _read(module, body, index, array)
            for index, name in enumerate(instruction.operands)
            for array in computation.instructions[name].arrays
        )
        return read + _written(module, body, instruction)
    if op in _SLICES:
        return written + (sum(a.bytes for a in instruction.arrays) if inputs[0].in_memory else 0.0)
    if op == "dynamic-update-slice":
        return inputs[1].moved + (inputs[1].bytes if inputs[0].in_memory else 0.0)
    if op == "scatter":
        return sum(a.moved for a in inputs[1:]) + inputs[-1].moved
    return sum(array.moved for array in inputs) + written


def _read(module: _Module, body: _Computation, index: int, array: _Array) -> float:
    """Bytes that a fusion reads of an operand: slices, where it only uses those."""
    parameter = body.parameter(index)
    if parameter is None or not array.in_memory:
        return 0.0
    return min(array.bytes, _used(module, body, parameter, array.bytes))


def _used(module: _Module, body: _Computation, value: _Instruction, full: float) -> float:
    total = 0.0
    for user in body.users(value.name):
        first = user.operands[0] == value.name
        if user.op in _SLICES and first:
            total += sum(array.bytes for array in user.arrays)
        elif user.op == "dynamic-update-slice" and first:
            continue  # the rest of it stays where it is
        elif user.op in _ALIASES:
            total += _used(module, body, user, full)
        elif user.op == "fusion":
            inner = module[user.called[0]]
            for index, name in enumerate(user.operands):
                parameter = inner.parameter(index) if name == value.name else None
                total += _used(module, inner, parameter, full) if parameter else 0.0
        elif user.op != "tuple":
            return full
    return total


def _written(module: _Module, body: _Computation, fusion: _Instruction) -> float:
    root = body.instructions[body.root]
    parts = [body.instructions[name] for name in root.operands] if root.op == "tuple" else [root]
    arrays = fusion.arrays
    if len(parts) != len(arrays):
        return sum(array.moved for array in arrays)
    return sum(
        min(array.bytes, _update(module, body, part, array.bytes)) if array.in_memory else 0.0
        for part, array in zip(parts, arrays, strict=True)
    )


def _update(module: _Module, body: _Computation, part: _Instruction, full: float) -> float:
    """Bytes that change in a result of `full` bytes."""
    if part.op in _ALIASES and part.operands:
        return _update(module, body, body.instructions[part.operands[0]], full)
    if part.op == "dynamic-update-slice":
        return sum(array.bytes for array in body.instructions[part.operands[1]].arrays)
    if part.op == "fusion":
        inner = module[part.called[0]]
        return _update(module, inner, inner.instructions[inner.root], full)
    return full
