"""Acting on an environment that counts: every step is sent once, in its place, under the right stamp."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import pytest
import zmq

from tianji_jax.actor import Actor, Role, TrajectoryBuilder, acting_spec
from tianji_jax.environments import Environments, make, make_spec
from tianji_jax.lock_step import Schedule
from tianji_jax.testing import TrivialAgent
from tianji_jax.transport import (
    Arrived,
    Codec,
    Credit,
    ParameterClient,
    ParameterServer,
    Requested,
    TrajectoryClient,
    TrajectoryServer,
)
from tianji_jax.types import trajectory_spec
from tianji_jax.worker import WorkerError, Workers

B, T = 4, 7
NAME = "tianji_jax.testing:CountingEnv"


class Learner:
    """The other end of an actor's sockets, played by the test."""

    def __init__(self, memory: bool, double_buffered: bool, lock_step: bool = False, **options: Any) -> None:
        env_spec = make_spec(NAME, options)
        self.agent = TrivialAgent(TrivialAgent.Config(memory=memory), env_spec)
        params, extras, state = acting_spec(self.agent, env_spec.observation)
        self.spec = trajectory_spec(env_spec, T, B, extras, state)
        self.context = zmq.Context()
        codec, parameter_codec = Codec(self.spec, {}), Codec(params, {})
        self.server = TrajectoryServer("inproc://trajectories", codec, self.context)
        self.parameters = ParameterServer("inproc://parameters", parameter_codec, self.context, keep=4)
        size = B // 2 if double_buffered else B

        def pools(start: int) -> list[Environments]:
            return [
                make(NAME, options, num_environments=size, seed=start + seed, threads=1) for seed in range(0, B, size)
            ]

        schedule = Schedule(actors=4, trajectories_per_update=4, max_lag=100) if lock_step else None
        self.actor = Actor(self.agent, pools, self.spec, jax.devices()[0], Role(3, 3, 0, 0, schedule))
        self.connect = lambda: (
            TrajectoryClient(self.server.endpoint, 3, codec, self.context),
            ParameterClient(self.parameters.endpoint, parameter_codec, self.context, exact=lock_step),
        )
        self.workers = Workers()
        self.requests: list[int] = []

    def publish(self, version: int, scale: float = 0.01) -> Any:
        state = self.agent.init(jax.random.key(version))
        self.parameters.publish(version, jax.tree.map(lambda x: np.asarray(x) * scale, state.params))
        return state.params

    def start(self) -> None:
        self.workers.start("parameters", self.parameters.serve)
        self.workers.start("actor", lambda stop: self.actor.run(*self.connect(), stop))

    def receive(self, count: int, credit: Callable[[int], Credit] = lambda index: Credit(0)) -> list[Arrived]:
        """Grant so many credits, the `index`-th being `credit(index)`, and wait for their trajectories."""
        arrived: list[Arrived] = []
        granted = 0
        while len(arrived) < count:
            self.workers.check()
            while self.requests and granted < count:
                assert self.server.grant(self.requests.pop(), credit(granted))
                granted += 1
            for event in self.server.poll(0.1):
                if isinstance(event, Requested):
                    self.requests.append(event.actor_id)
                elif isinstance(event, Arrived):
                    arrived.append(event)
        return arrived


@contextmanager
def running(learner: Learner) -> Iterator[Learner]:
    try:
        yield learner
    finally:
        assert learner.workers.close(5) == []
        learner.server.close()
        learner.parameters.close()
        learner.context.destroy(linger=0)


@pytest.mark.parametrize("double_buffered", [False, True])
@pytest.mark.parametrize("end", ["terminate", "truncate"])
def test_no_step_is_lost_and_none_is_sent_twice(double_buffered: bool, end: str) -> None:
    length = 5
    with running(Learner(True, double_buffered, episode_length=length, end=end)) as learner:
        learner.publish(0)
        learner.start()
        events = learner.receive(6)
    assert [event.stamp for event in events] == [(0, 3, n) for n in range(6)]
    trajectories = [event.trajectory for event in events]
    for before, after in pairwise(trajectories):
        np.testing.assert_array_equal(before.observation[-1], after.observation[0])
        np.testing.assert_array_equal(before.is_first[-1], after.is_first[0])
    seen = np.concatenate([t.observation[:-1] for t in trajectories])
    following = np.concatenate([t.observation[1:] for t in trajectories])
    reward, valid, is_first, terminated, truncated = (
        np.concatenate([getattr(t, name)[:T] for t in trajectories])
        for name in ("reward", "valid", "is_first", "terminated", "truncated")
    )
    # An episode of `length` steps, then the step that resets: the clock of each environment has period length + 1.
    clock = np.arange(6 * T) % (length + 1)
    np.testing.assert_array_equal(seen[..., 1], np.broadcast_to(clock[:, None], (6 * T, B)))
    np.testing.assert_array_equal(
        seen[..., 0], np.broadcast_to((np.arange(6 * T) // (length + 1))[:, None], (6 * T, B))
    )
    np.testing.assert_array_equal(is_first, seen[..., 1] == 0)
    np.testing.assert_array_equal(valid, seen[..., 1] != length)
    np.testing.assert_array_equal(reward, np.where(valid, following[..., 1], 0))
    last = seen[..., 1] == length - 1
    np.testing.assert_array_equal(terminated, last if end == "terminate" else np.zeros_like(last))
    np.testing.assert_array_equal(truncated, last if end == "truncate" else np.zeros_like(last))
    # The true last observation is there to bootstrap from.
    assert (following[last][..., 1] == length).all()
    episodes = [episode for event in events for episode in event.episodes]
    assert episodes == [(length * (length + 1) / 2, length)] * (6 * T // (length + 1) * B)


@pytest.mark.parametrize("double_buffered", [False, True])
def test_the_recurrent_state_at_the_start_travels(double_buffered: bool) -> None:
    """The trivial agent's memory counts the steps it has seen of the episode."""
    with running(Learner(True, double_buffered, episode_length=5)) as learner:
        learner.publish(0)
        learner.start()
        events = learner.receive(4)
    seen = 0
    for index, event in enumerate(events):
        expected = 0 if index == 0 else (index * T - 1) % 6 + 1
        np.testing.assert_array_equal(event.trajectory.state, np.full(B, expected, np.int32))
        seen += T


def test_log_probs_are_those_of_the_stamped_parameters_for_the_whole_unroll() -> None:
    with running(Learner(False, True, episode_length=50)) as learner:
        params = [learner.publish(0, 100.0)]
        learner.start()
        events = learner.receive(1)
        params.append(learner.publish(5, 100.0))
        events += learner.receive(2, lambda index: Credit(5))
    assert [event.stamp.policy_version for event in events] == [0, 5, 5]
    for event in events:
        weights = jax.tree.map(lambda x: np.asarray(x) * 100.0, params[1 if event.stamp.policy_version else 0])
        x = event.trajectory.observation[:-1]
        logits = x / (1 + np.abs(x)) @ weights["weights"] + weights["bias"]
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        chosen = np.take_along_axis(log_probs, event.trajectory.action[..., None], -1)[..., 0]
        np.testing.assert_allclose(event.trajectory.extras["log_prob"], chosen, rtol=1e-4, atol=1e-5)


def test_an_actor_takes_the_newest_parameters_but_in_lock_step_those_it_is_told() -> None:
    for lock_step, expected in ((False, [3, 3]), (True, [1, 2])):
        with running(Learner(False, True, lock_step, episode_length=50)) as learner:
            for version in range(4):
                learner.publish(version)
            learner.start()
            events = learner.receive(2, lambda index: Credit(1 + index))
        assert [event.stamp.policy_version for event in events] == expected


def test_an_actor_without_credit_waits_and_stops_when_told() -> None:
    with running(Learner(False, True)) as learner:
        learner.publish(0)
        learner.start()
        learner.receive(1)
        assert not [event for event in learner.server.poll(0.5) if isinstance(event, Arrived)]


def test_acting_is_traced_once() -> None:
    learner = Learner(False, True, episode_length=3)
    traces = []
    act = learner.agent.act
    learner.agent.act = lambda *arguments: (traces.append(1), act(*arguments))[1]  # type: ignore[method-assign]
    with running(learner):
        learner.publish(0)
        learner.start()
        learner.receive(2)
        learner.publish(1)
        learner.receive(2, lambda index: Credit(1))
    assert len(traces) == 1


def test_actions_are_drawn_differently_by_every_actor_and_step() -> None:
    with running(Learner(False, True, episode_length=50)) as learner:
        learner.publish(0, 0.0)
        learner.start()
        events = learner.receive(4)
    actions = np.concatenate([event.trajectory.action for event in events])
    assert 0.3 < actions.mean() < 0.7
    assert len({tuple(row) for row in actions.T}) == B


def test_an_environment_that_raises_ends_the_actor_with_its_error() -> None:
    learner = Learner(False, True, fail_at_step=3)
    with running(learner):
        learner.publish(0)
        learner.start()
        with pytest.raises(WorkerError, match=r"actor failed: .*CountingEnv fails at step 3"):
            learner.receive(1)


def test_each_trajectory_has_buffers_of_its_own() -> None:
    with running(Learner(True, False)) as learner:
        builder = TrajectoryBuilder(learner.spec)
    builder.begin([(slice(0, B), np.zeros(B, np.int32))])
    first = builder.trajectory
    builder.begin([(slice(0, B), np.zeros(B, np.int32))])
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(builder.trajectory), strict=True):
        assert not np.shares_memory(a, b)
