"""Groups that train together: real sockets, real processes."""

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zmq

from short_runs import counting_config, free_ports
from test_world import CACHE
from tianji_jax.agent import CanBeFused, Fused
from tianji_jax.blueprint import plan
from tianji_jax.config import Config, ConfigError, GroupsConfig, RunConfig, to_yaml, validate
from tianji_jax.group import fusing_codec
from tianji_jax.root import Root, serve
from tianji_jax.transport import (
    Answer,
    Authenticator,
    Codec,
    GroupsRefused,
    Progress,
    RootLink,
    RootSocket,
    load_server_keys,
    make_keys,
)
from tianji_jax.worker import Workers

ENDLESS = 10**9


def group_config(folder: Path, port: int, **sections: dict[str, Any]) -> Config:
    return counting_config(
        folder,
        {
            "run": {"name": "a", "seed": 1, "compilation_cache": str(CACHE)},
            "groups": {"root": f"tcp://127.0.0.1:{port}", "every_learner_steps": 4, "silence_seconds": 3},
            "environment": {"options": {"episode_length": 5, "step_seconds": 1e-3}},
            "checkpoint": {"every_learner_steps": 20},
        },
        sections,
    )


@contextlib.contextmanager
def rooted(codec: Codec, **groups: float) -> Iterator[tuple[str, Root, list[int], zmq.Context]]:
    """A root that serves, on a thread; its address, itself, and how many messages it has rejected."""
    address = f"tcp://127.0.0.1:{free_ports()}"
    root, context, stop = Root(GroupsConfig.model_validate(groups), RunConfig()), zmq.Context(), threading.Event()
    rejected = [0]
    socket = RootSocket(address, codec, context, None)

    def run() -> None:
        while not stop.is_set():
            rejected[0] += socket.words(lambda word: root.hear(word, time.monotonic()))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield address, root, rejected, context
    finally:
        stop.set()
        thread.join()
        socket.close()
        context.destroy(linger=0)


@pytest.fixture
def codec(tmp_path: Path) -> Codec:
    return fusing_codec(plan(group_config(tmp_path, 5555)))


def answer_of(link: RootLink, kind: str) -> Answer:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for answer in link.turn(Progress(5, None)):
            if answer.kind == kind:
                return answer
    raise AssertionError(f"no answer {kind!r}")


def filled(codec: Codec, value: float) -> Fused:
    tree: Fused = jax.tree.map(lambda spec: np.full(spec.shape, value, np.float32), codec.spec)
    return tree


def test_what_two_groups_bring_comes_back_fused(codec: Codec) -> None:
    with rooted(codec) as (address, root, _, context):
        links = [RootLink(address, codec, context, None, name, seed) for seed, name in enumerate("ab")]
        for link, value in zip(links, (1.0, 2.0), strict=True):
            link.bring("join", filled(codec, value))
            assert np.all(answer_of(link, "fused").values.params["bias"] == 1)
        for link, value in zip(links, (2.0, 6.0), strict=True):
            link.bring("push", filled(codec, value))
        found = max(float(answer_of(link, "fused").values.params["weights"][0, 0]) for link in links)
        assert found == 1 + (2 + 6) / 2
        together = answer_of(links[0], "standing").together
        assert (together.groups, together.elsewhere, together.outer_steps) == (2, 5, 2)
        for link in links:
            link.end(Progress(9, None), for_good=True)
            link.close()
        assert root.ended
        assert root.together().environment_steps == 18


def test_rubbish_is_rejected_and_harms_nobody(codec: Codec) -> None:
    rng = np.random.default_rng(0)
    with rooted(codec) as (address, root, rejected, context):
        good, bad = RootLink(address, codec, context, None, "good", 0), context.socket(zmq.DEALER)
        bad.linger = 0
        bad.connect(address)
        good.bring("join", filled(codec, 1.0))
        answer_of(good, "fused")
        head = {"kind": "push", "group": "bad", "number": 1, "root": "", "seed": 3}
        head |= {"environment_steps": 1, "window_return": None}
        whole = codec.encode(head, filled(codec, np.nan))
        messages = [
            [rng.bytes(50)],
            whole,  # not finite
            [whole[0]],  # nothing but the header
            [*whole[:-1], b"short"],
            codec.encode(head | {"environment_steps": -1}, filled(codec, 0.0)),
            codec.encode(head | {"group": 7}, filled(codec, 0.0)),
            codec.encode(head | {"window_return": "high"}, filled(codec, 0.0)),
            [codec.encode_header(head | {"kind": "rule"})],
        ]
        for message in messages:
            bad.send_multipart(message)
        deadline = time.monotonic() + 10
        while rejected[0] < len(messages) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert rejected[0] == len(messages)
        good.bring("push", filled(codec, 1.0))
        assert np.all(answer_of(good, "fused").values.params["bias"] == 2)
        assert root.together().groups == 1
        bad.close()
        good.close()


def test_another_configuration_is_refused_and_the_difference_named(tmp_path: Path, codec: Codec) -> None:
    other = fusing_codec(plan(group_config(tmp_path, 5555, agent={"learning_rate": 0.5})))
    with rooted(codec) as (address, root, _, context):
        link = RootLink(address, other, context, None, "a", 0)
        link.bring("join", filled(other, 1.0))
        with pytest.raises(GroupsRefused, match=r"agent\.learning_rate: 0\.5 where the .* has 0\.01"):
            answer_of(link, "fused")
        link.close()
        assert root.together().groups == 0


@pytest.mark.parametrize(
    ("name", "environment", "settings"),
    [
        ("ppo", "CartPole-v1", {"normalise_observations": True, "normalise_rewards": True}),
        ("impala", "CartPole-v1", {"network": {"recurrence": "lstm"}}),
        ("dqn", "CartPole-v1", {}),
        ("r2d2", "CartPole-v1", {}),
        ("sac", "Pendulum-v1", {}),
        ("td3", "Pendulum-v1", {}),
        ("ddpg", "Pendulum-v1", {}),
    ],
)
def test_every_agent_can_be_fused(tmp_path: Path, name: str, environment: str, settings: dict[str, Any]) -> None:
    config = group_config(tmp_path, 5555).model_dump()
    config |= {"environment": {"name": f"envpool:{environment}"}, "agent": {"name": name, **settings}}
    agent = plan(validate(config)).agent
    assert isinstance(agent, CanBeFused)
    state = jax.eval_shape(agent.init, jax.random.key(0))
    fused = jax.eval_shape(agent.to_fuse, state)
    assert all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(fused.params))
    assert len(jax.tree.leaves(fused.statistics)) == (5 if name == "ppo" else 0)
    again = jax.eval_shape(agent.with_fused, state, fused)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert jax.tree.leaves(again) == jax.tree.leaves(state)


class Command:
    """A `tianji` that runs, and what it prints."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.output = folder / f"output-{name}-{time.monotonic_ns()}"
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tianji_jax.cli", *arguments], stdout=file, stderr=subprocess.STDOUT
            )

    def text(self) -> str:
        return self.output.read_text()

    def end(self) -> str:
        assert self.process.wait(120) == 0, self.text()
        return self.text()


@contextlib.contextmanager
def commands(folder: Path) -> Iterator[Callable[..., Command]]:
    """Starts commands, all of which have ended afterwards."""
    started: list[Command] = []

    def start(name: str, *arguments: str) -> Command:
        started.append(Command(folder, name, *arguments))
        return started[-1]

    try:
        yield start
    finally:
        for command in started:
            command.process.kill()
            command.process.wait()


def reports(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def until(folder: Path, condition: Callable[[dict[str, Any]], bool], seconds: float = 90) -> dict[str, Any]:
    """The first report that is so."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for report in reports(folder):
            if "groups" in report and condition(report):
                return report
        time.sleep(0.2)
    raise AssertionError(reports(folder)[-1:])


def fused(report: dict[str, Any], groups: int, outer_steps: int) -> bool:
    return report["groups"] == groups and report["outer_steps"] >= outer_steps


@pytest.mark.slow
def test_groups_fall_away_and_catch_up_and_survive_their_root(tmp_path: Path) -> None:
    """Two groups and a root; a group is killed and resumed, then the root is; then all end together."""
    port = free_ports()
    (tmp_path / "c.yaml").write_text(to_yaml(group_config(tmp_path, port, run={"environment_steps": ENDLESS})))
    file = str(tmp_path / "c.yaml")
    with commands(tmp_path) as start:
        root = start("root", "root", file)
        first = start("a", "train", file)
        second = start("b", "train", file, "run.seed=2", "run.name=b")
        until(tmp_path / "b", lambda report: fused(report, 2, 10) and report["learner_steps"] > 50)
        second.process.kill()
        gone = reports(tmp_path / "a")[-1]["outer_steps"]
        alone = until(tmp_path / "a", lambda report: report["groups"] == 1 and report["outer_steps"] > gone)
        second = start("b", "train", "--resume", str(tmp_path / "b"))
        again = until(tmp_path / "a", lambda report: fused(report, 2, alone["outer_steps"] + 5))
        # What the killed one had done counts on, and not twice.
        assert again["environment_steps"] >= alone["environment_steps"]
        assert "has not been heard of" in root.text()
        root.process.kill()
        before = len(reports(tmp_path / "a"))
        root = start("root", "root", file)
        deadline = time.monotonic() + 60
        # The new root counts from 0 again.
        while not any(
            fused(r, 2, 5) and r["outer_steps"] < again["outer_steps"] for r in reports(tmp_path / "a")[before:]
        ):
            assert time.monotonic() < deadline, (root.text(), first.text())
            time.sleep(0.2)
        for command in (first, second):
            command.process.terminate()
            assert command.process.wait(30) == 75, command.text()


@pytest.mark.slow
def test_the_end_of_all_is_the_end_of_each(tmp_path: Path) -> None:
    port = free_ports()
    (tmp_path / "c.yaml").write_text(to_yaml(group_config(tmp_path, port, run={"environment_steps": 6000})))
    file = str(tmp_path / "c.yaml")
    with commands(tmp_path) as start:
        root = start("root", "root", file)
        groups = [start(name, "train", file, f"run.seed={seed}", f"run.name={name}") for seed, name in enumerate("ab")]
        for group in groups:
            group.end()
        said = root.end()
    total = int(re.findall(r"after ([\d,]+) environment steps", said)[-1].replace(",", ""))
    last = [reports(tmp_path / name)[-1] for name in "ab"]
    # Each counts the other's steps too, as far as it has heard of them.
    assert all(6000 <= report["environment_steps"] <= total for report in last)
    own = [json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])["frames"] for name in "ab"]
    assert min(own) >= 6000
    assert last[0]["outer_steps"] > 4


@pytest.mark.slow
def test_a_group_may_have_several_learners(tmp_path: Path) -> None:
    port, meeting = free_ports(), free_ports()
    config = group_config(tmp_path, port, run={"environment_steps": 6000}, learner={"platform": "cpu"})
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    file = str(tmp_path / "c.yaml")
    with commands(tmp_path) as start:
        root = start("root", "root", file)
        place = ["--coordinator", f"127.0.0.1:{meeting}", "--process"]
        world = [start(f"learner-{rank}", "learner", file, *place, f"{rank}/2") for rank in range(2)]
        alone = start("b", "train", file, "run.seed=2", "run.name=b")
        for command in (*world, alone, root):
            command.end()
    last = reports(tmp_path / "a")[-1]
    assert last["outer_steps"] > 4
    assert last["environment_steps"] >= 6000


def test_a_root_that_needs_keys_or_has_no_address_says_so(tmp_path: Path) -> None:
    config = group_config(tmp_path, 5555)
    beyond = config.model_copy(update={"groups": GroupsConfig(root="tcp://10.1.2.3:5555")})
    with pytest.raises(ConfigError, match=r"groups\.root: tcp://10\.1\.2\.3:5555 is beyond this host"):
        serve(beyond)
    with pytest.raises(ConfigError, match=r"groups\.root is not set"):
        serve(config.model_copy(update={"groups": GroupsConfig()}))


def test_with_keys_strangers_bring_nothing(tmp_path: Path, codec: Codec) -> None:
    make_keys(tmp_path / "ours")
    make_keys(tmp_path / "theirs")
    ours, theirs = (load_server_keys(tmp_path / name) for name in ("ours", "theirs"))
    context, workers = zmq.Context(), Workers()
    authenticator = Authenticator(frozenset([ours.public]), context)
    workers.start("authenticator", authenticator.run)
    address = f"tcp://127.0.0.1:{free_ports()}"
    root, socket = Root(GroupsConfig(), RunConfig()), RootSocket(address, codec, context, ours)

    def run(stop: threading.Event) -> None:
        while not stop.is_set():
            socket.words(lambda word: root.hear(word, time.monotonic()))

    workers.start("root", run)
    elsewhere = zmq.Context()
    friend, stranger = (
        RootLink(address, codec, elsewhere, keys, n, i) for i, (keys, n) in enumerate([(ours, "f"), (theirs, "s")])
    )
    try:
        stranger.bring("join", filled(codec, 9.0))
        friend.bring("join", filled(codec, 1.0))
        assert np.all(answer_of(friend, "fused").values.params["bias"] == 1)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            assert not list(stranger.turn(Progress(0, None)))
        assert root.together().groups == 1
    finally:
        friend.close()
        stranger.close()
        elsewhere.destroy(linger=0)
        assert not workers.close(2)
        authenticator.close()
        socket.close()
        context.destroy(linger=0)
