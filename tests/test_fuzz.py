"""A learner at work is sent rubbish over real sockets: it goes on, learns the same, and accounts for every message."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import msgpack
import numpy as np
import psutil
import pytest
import zmq
from gymnasium.envs.classic_control import CartPoleEnv

import tianji_jax.blueprint
import tianji_jax.run
from short_runs import cartpole_config, free_ports, train
from tianji_jax.blueprint import Addresses, Blueprint, plan
from tianji_jax.config import Config
from tianji_jax.staleness import Ledger
from tianji_jax.transport import ParameterServer
from tianji_jax.transport.peers import REJECTION_LIMIT, actor_identity
from tianji_jax.worker import Workers

MESSAGES = 100_000
PEERS = 8
"""Connections at a time. Each sends more than the learner reads before it is cut off, and makes room for the next."""

MESSAGES_PER_PEER = 250

GROWTH_LIMIT = 32 * 2**20
"""Bytes by which the process, senders included, may grow. Messages have 1.6 KB in 15 frames on average. In flight are
at most `PEERS` times twice the high-water mark (256 messages on either side) of them: 7 MB, and as much for the frames'
own records. All together they are 160 MB: a learner that kept a fifth of them would be found out."""

PACE = threading.Event()
"""Unset: environments step slowly, so that the run outlasts the rubbish; how fast they step changes no number."""


class PacedCartPole(CartPoleEnv):
    """CartPole that sleeps in each step until `PACE` is set."""

    def step(self, action: int) -> Any:
        if not PACE.is_set():
            time.sleep(0.01)
        return super().step(action)


class Rubbish:
    """Makes malformed messages of all kinds."""

    def __init__(self, blueprint: Blueprint, other: Blueprint, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.codec, self._other = blueprint.trajectory_codec(), other.trajectory_codec()
        self._header = {
            "kind": "trajectory",
            "received": 0,
            "version": 0,
            "sequence": 0,
            "returns": b"",
            "lengths": b"",
            "seconds": {},
            "sent": 0.0,
        }
        self._good = self.trajectory()
        kinds = [self.noise, self.truncated, self.cut, self.too_many, self.wrong_shape, self.claims, self.not_finite]
        kinds += [self.replayed, self.future, self.another_run, self.hello, self.mutated, self.gossip]
        self.kinds: list[Callable[[], list[bytes]]] = kinds

    def any(self) -> list[bytes]:
        return self.kinds[self._rng.integers(len(self.kinds))]()

    def trajectory(self, value: float = 0.0, **entries: Any) -> list[bytes]:
        """A good one but for `value` and the `entries` of its header."""
        tree = jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), self.codec.spec)
        tree.reward[:] = value
        return [bytes(memoryview(frame)) for frame in self.codec.encode({**self._header, **entries}, tree)]

    def noise(self) -> list[bytes]:
        return [self._rng.bytes(self._rng.integers(0, 2000)) for _ in range(self._rng.integers(1, 9))]

    def truncated(self) -> list[bytes]:
        return self._good[: self._rng.integers(1, len(self._good))]

    def cut(self) -> list[bytes]:
        place = self._rng.integers(len(self._good))
        frames = list(self._good)
        frames[place] = frames[place][: self._rng.integers(len(frames[place]))]
        return frames

    def too_many(self) -> list[bytes]:
        return self._good + [b"x"] * int(self._rng.integers(1, 200))

    def wrong_shape(self, **entries: Any) -> list[bytes]:
        """As another spec says, under the learner's own fingerprint; dtypes are of other sizes as well."""
        header, *frames = self.trajectory(**entries)
        return [header, *(bytes(memoryview(self._rng.bytes(3 * len(frame)))) for frame in frames)]

    def claims(self) -> list[bytes]:
        heads = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\x7f\xff\xff\xff"]
        return [heads[self._rng.integers(4)] * int(self._rng.integers(1, 50)), *self._good[1:]]

    def not_finite(self) -> list[bytes]:
        return self.trajectory((np.nan, np.inf, -np.inf)[self._rng.integers(3)])

    def replayed(self) -> list[bytes]:
        return self._good

    def future(self) -> list[bytes]:
        return self.trajectory(version=2**40, sequence=2**40)

    def another_run(self, **entries: Any) -> list[bytes]:
        header = self._other.encode_header({**self._header, **entries})
        return [header, *self._good[1:]]

    def hello(self) -> list[bytes]:
        codec = (self.codec, self._other)[self._rng.integers(2)]
        fields = {"kind": "hello", "received": 0, "sequence": 0, "description": codec.description}
        return [codec.encode_header(fields)]

    def mutated(self) -> list[bytes]:
        frames = [bytearray(frame) for frame in self._good]
        for _ in range(3):
            frame = frames[self._rng.integers(len(frames))]
            if frame:
                frame[self._rng.integers(len(frame))] ^= 1 << int(self._rng.integers(8))
        return [bytes(frame) for frame in frames]

    def gossip(self) -> list[bytes]:
        words: list[Any] = [None, -1, 2**64 - 1, 1.5, "", b"", [], {}, True, "9" * 500]
        names = ("kind", "protocol", "fingerprint", *self._header)
        return [msgpack.packb({name: words[self._rng.integers(len(words))] for name in names}), *self._good[1:]]

    def identity(self) -> bytes:
        """Of an actor of the learner's own, of one that could be, or of nobody."""
        ids = (0, 1, int(self._rng.integers(2, 65_536)))
        return actor_identity(ids[self._rng.integers(3)]) if self._rng.integers(4) else self._rng.bytes(20) + b"."


class Witness:
    """The learner's own account, while it works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ledgers: list[Ledger] = []
        self.servers: list[ParameterServer] = []
        self._record(monkeypatch, tianji_jax.run, Ledger, self.ledgers)
        self._record(monkeypatch, tianji_jax.blueprint, ParameterServer, self.servers)

    @staticmethod
    def _record(monkeypatch: pytest.MonkeyPatch, module: Any, cls: Any, made: list[Any]) -> None:
        def make(*arguments: Any) -> Any:
            made.append(cls(*arguments))
            return made[-1]

        monkeypatch.setattr(module, cls.__name__, make)

    @property
    def rejections(self) -> tuple[Counter[str], Counter[str]]:
        """By reason, of the streams of trajectories and of parameters."""
        return Counter(self.ledgers[-1].rejections), Counter(self.servers[-1].rejections)

    def wait_for_updates(self, trajectories: int) -> int:
        """Until so many more have been consumed; returns how many have in all."""
        until(lambda: bool(self.ledgers))
        goal = self.ledgers[-1].counts.consumed + trajectories
        until(lambda: self.ledgers[-1].counts.consumed >= goal)
        return self.ledgers[-1].counts.consumed


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def peers(address: str, identities: list[bytes]) -> Iterator[list[zmq.Socket]]:
    """Raw sockets; at the end all that they were given has gone out."""
    context = zmq.Context()
    sockets = [context.socket(zmq.DEALER) for _ in identities]
    for socket, identity in zip(sockets, identities, strict=True):
        socket.routing_id, socket.linger, socket.sndhwm = identity, 30_000, 256
        socket.connect(address)
    yield sockets
    for socket in sockets:
        socket.close()
    context.term()


def send_rubbish(addresses: Addresses, rubbish: Rubbish, witness: Witness) -> tuple[Counter[str], int]:
    """Send `MESSAGES`, an eighth of them to the parameter server; messages by stream, and the growth of memory."""
    sent: Counter[str] = Counter()
    process, size = psutil.Process(), 0
    batches = MESSAGES // (PEERS * MESSAGES_PER_PEER)
    for batch in range(batches):
        stream = "parameters" if batch % 8 == 7 else "trajectories"
        with peers(getattr(addresses, stream), [rubbish.identity() for _ in range(PEERS)]) as sockets:
            for _ in range(MESSAGES_PER_PEER):
                for socket in sockets:
                    socket.send_multipart(rubbish.any())
                    sent[stream] += 1
        if batch == batches // 10:
            size = process.memory_info().rss
    until(lambda: [sum(counts.values()) for counts in witness.rejections] == [sent["trajectories"], sent["parameters"]])
    return sent, process.memory_info().rss - size


def fuzz_config(directory: Path, *overrides: dict[str, Any]) -> Config:
    return cartpole_config(
        directory,
        {
            "run": {"environment_steps": 20_000},
            "environment": {"name": f"{__name__}:PacedCartPole"},
            "actors": {"count": 2, "environments": 4, "unroll_length": 8},
            "learner": {"trajectories_per_update": 2},
        },
        *overrides,
    )


def assert_account_balances(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        parts = [report[f"trajectories_{name}"] for name in ("consumed", "dropped", "rejected", "queued")]
        assert report["trajectories_received"] == sum(parts)


@pytest.mark.filterwarnings("ignore:.*CartPole.*:DeprecationWarning")
def test_a_hundred_thousand_malformed_messages_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In lock-step, so that the parameters can be compared bit for bit with those of a run that was left in peace."""
    lock_step = {"run": {"deterministic": True}}
    PACE.set()
    peace, _ = train(fuzz_config(tmp_path, lock_step))
    PACE.clear()
    witness, workers = Witness(monkeypatch), Workers()
    listen = f"tcp://127.0.0.1:{free_ports()}"
    config = fuzz_config(tmp_path, lock_step, {"actors": {"listen": listen}})
    rubbish = Rubbish(plan(config), plan(fuzz_config(tmp_path, {"actors": {"unroll_length": 4}})), seed=0)
    told: dict[str, Any] = {}

    def attack(stop: threading.Event) -> None:
        try:
            before = witness.wait_for_updates(4)
            told["sent"], told["growth"] = send_rubbish(Addresses.at(listen), rubbish, witness)
            told["consumed"] = witness.ledgers[-1].counts.consumed - before
            witness.wait_for_updates(2)
        finally:
            PACE.set()

    workers.start("attack", attack)
    result, reports = train(config)
    assert workers.close(10) == []
    workers.check()

    assert sum(told["sent"].values()) == MESSAGES
    assert told["consumed"] > 10, "the run did not go on meanwhile"
    assert told["growth"] < GROWTH_LIMIT
    assert_account_balances(reports)
    trajectories, parameters = witness.rejections
    assert reports[-1]["trajectories_rejected"] == sum(trajectories.values()) == told["sent"]["trajectories"]
    assert sum(parameters.values()) == told["sent"]["parameters"]
    assert set(trajectories) == {"malformed", "protocol", "actor_id", "cut_off"}
    read = sum(trajectories.values()) - trajectories["cut_off"]
    assert read == told["sent"]["trajectories"] // MESSAGES_PER_PEER * REJECTION_LIMIT
    assert reports[-1]["trajectories_dropped"] == 0
    assert result.environment_steps == peace.environment_steps
    jax.tree.map(np.testing.assert_array_equal, result.train_state, peace.train_state)


class Intruder:
    """An actor from outside that says hello as it should and then sends what it should not."""

    def __init__(self, address: str, actor_id: int, rubbish: Rubbish, context: zmq.Context) -> None:
        self._rubbish, self._codec = rubbish, rubbish.codec
        self._socket = context.socket(zmq.DEALER)
        self._socket.routing_id, self._socket.linger = actor_identity(actor_id), 30_000
        self._socket.connect(address)
        self._received = 0
        fields = {"kind": "hello", "received": 0, "sequence": 0, "description": self._codec.description}
        self._socket.send(self._codec.encode_header(fields))
        self._answer("welcome")

    def credit(self, sequence: int) -> None:
        """Ask for permission and wait for it."""
        fields = {"kind": "request", "requested": self._received + 1, "sequence": sequence, "received": self._received}
        self._socket.send(self._codec.encode_header(fields))
        self._answer("credit")
        self._received += 1

    def send(self, frames: list[bytes]) -> None:
        self._socket.send_multipart(frames)

    def close(self) -> None:
        self._socket.close()

    def _answer(self, kind: str) -> None:
        while True:
            assert self._socket.poll(30_000), f"no {kind}"
            if self._codec.decode_header(self._socket.recv())["kind"] == kind:
                return


def test_what_an_actor_that_has_been_let_in_may_not_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    witness, workers = Witness(monkeypatch), Workers()
    listen = f"tcp://127.0.0.1:{free_ports()}"
    config = fuzz_config(tmp_path, {"run": {"environment_steps": 5000}, "actors": {"listen": listen, "count": 1}})
    rubbish = Rubbish(plan(config), plan(fuzz_config(tmp_path, {"actors": {"unroll_length": 4}})), seed=1)
    address = Addresses.at(listen).trajectories
    PACE.clear()

    def intrude(stop: threading.Event) -> None:
        context = zmq.Context()
        try:
            witness.wait_for_updates(2)
            careful = Intruder(address, 70_000, rubbish, context)
            for sequence, frames in enumerate(
                (
                    rubbish.trajectory(np.nan, sequence=0),
                    rubbish.trajectory(sequence=1, version=2**40),
                    rubbish.wrong_shape(sequence=2),
                    rubbish.another_run(sequence=3),
                )
            ):
                careful.credit(sequence)
                careful.send(frames)
            careful.send(rubbish.trajectory(sequence=4))  # without a credit
            careful.send(rubbish.trajectory(sequence=1))  # again
            careful.close()
            wild = [Intruder(address, 80_000 + number, rubbish, context) for number in range(20)]
            for _ in range(500):
                for intruder in wild:
                    intruder.send(rubbish.any())
            for intruder in wild:
                intruder.close()
            context.term()
            witness.wait_for_updates(4)
        finally:
            PACE.set()

    workers.start("intruder", intrude)
    result, reports = train(config)
    assert workers.close(10) == []
    workers.check()
    rejections, _ = witness.rejections
    assert rejections["non_finite"] == rejections["shape"] == 1
    for reason in ("future", "fingerprint", "uncredited", "replayed", "cut_off", "malformed"):
        assert rejections[reason] >= 1, rejections
    assert_account_balances(reports)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.train_state))
    assert reports[-1]["rejected/non_finite"] == 1
