"""The law of balance, under every order of events hypothesis can think of."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tianji_jax.balance import Balance
from tianji_jax.lock_step import LockStepBalance


class World:
    """Actors and a learner around a balance; trajectories are consumed first in, first out."""

    def __init__(self, max_lag: int, trajectories: int, actors: int) -> None:
        self.balance = Balance(max_lag, trajectories)
        self.trajectories = trajectories
        self.version = 0
        self.holding: list[tuple[int, int]] = []
        self.queue: list[int] = []
        self.lags: list[int] = []
        for actor in range(actors):
            self.balance.request(actor)

    def grant(self) -> None:
        for actor, credit in self.balance.grants(self.version):
            assert credit.version <= self.version
            self.holding.append((actor, credit.version))

    def deliver(self, index: int) -> None:
        actor, version = self.holding.pop(index)
        self.balance.request(actor)
        self.balance.arrive(actor, version)
        self.queue.append(version)

    def update(self) -> None:
        batch, self.queue = self.queue[: self.trajectories], self.queue[self.trajectories :]
        self.lags += [self.version - version for version in batch]
        self.version += 1
        self.balance.release(len(batch))


@given(
    st.integers(0, 4), st.integers(1, 4), st.integers(1, 6), st.lists(st.integers(0, 100), min_size=20, max_size=200)
)
def test_outstanding_never_exceeds_the_law_and_nobody_waits_for_ever(
    max_lag: int, trajectories: int, actors: int, choices: list[int]
) -> None:
    world = World(max_lag, trajectories, actors)
    for choice in choices:
        world.grant()
        assert world.balance.outstanding == len(world.holding) + len(world.queue)
        assert world.balance.outstanding <= (max_lag + 1) * trajectories
        can_update = len(world.queue) >= trajectories
        # Someone can always go on: a trajectory is on its way, or a batch is complete.
        assert world.holding or can_update
        if can_update and (choice % 2 or not world.holding):
            world.update()
        else:
            world.deliver(choice % len(world.holding))


@given(st.integers(0, 4), st.integers(1, 4), st.lists(st.booleans(), min_size=20, max_size=200))
def test_in_order_nothing_gets_older_than_max_lag(max_lag: int, trajectories: int, choices: list[bool]) -> None:
    """One actor delivers in the order it was granted: the law alone bounds the lag, and nothing has to be dropped."""
    world = World(max_lag, trajectories, 1)
    for update_first in choices:
        world.grant()
        can_update = len(world.queue) >= trajectories
        if can_update and (update_first or not world.holding):
            world.update()
        else:
            world.deliver(0)
    assert max(world.lags, default=0) <= max_lag


def test_credits_go_out_in_the_order_they_were_asked_for() -> None:
    balance = Balance(0, 2)
    for actor in (3, 1, 2):
        balance.request(actor)
    assert [actor for actor, _ in balance.grants(0)] == [3, 1]
    assert balance.grants(0) == []
    balance.arrive(3, 0)
    balance.arrive(1, 0)
    balance.release(2)
    assert [(actor, credit.version) for actor, credit in balance.grants(1)] == [(2, 1)]


def test_what_a_gone_actor_held_goes_to_the_others() -> None:
    balance = Balance(0, 1)
    balance.request(0)
    balance.request(1)
    assert [actor for actor, _ in balance.grants(0)] == [0]
    balance.leave(0)
    assert [actor for actor, _ in balance.grants(0)] == [1]
    balance.lose(1)
    assert balance.outstanding == 0


def test_reuse_only_where_everything_in_flight_stays_young_enough() -> None:
    balance = Balance(max_lag=2, trajectories_per_update=1)
    assert balance.can_reuse(0)
    balance.request(0)
    balance.grants(0)
    # Granted at version 0: two passes make it 2 old when it comes, three would make it 3.
    assert balance.can_reuse(1)
    assert not balance.can_reuse(2)
    balance.request(0)
    balance.grants(0)
    # A second one in flight is learned from one version later.
    assert balance.can_reuse(0)
    assert not balance.can_reuse(1)


@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_lock_step_names_the_version_whatever_the_timing(
    max_lag: int, trajectories: int, actors: int, random: object
) -> None:
    balance = LockStepBalance(max_lag, trajectories, actors)
    sequence, arrived, version, named = [0] * actors, set(), 0, {}
    for actor in range(actors):
        balance.request(actor)
    holding: list[int] = []
    for _ in range(100):
        for actor, credit in balance.grants(version):
            named[sequence[actor] * actors + actor] = credit.version
            holding.append(actor)
        assert balance.outstanding <= (max_lag + 1) * trajectories
        batch = range(version * trajectories, (version + 1) * trajectories)
        if all(number in arrived for number in batch):
            balance.release(trajectories)
            version += 1
            continue
        actor = holding.pop(random.randrange(len(holding)))  # type: ignore[attr-defined]
        arrived.add(sequence[actor] * actors + actor)
        sequence[actor] += 1
        balance.request(actor)
        balance.arrive(actor, 0)
    assert version > 0
    assert named == {number: max(0, number // trajectories - max_lag) for number in named}


def test_lock_step_does_not_go_on_without_a_lost_trajectory() -> None:
    balance = LockStepBalance(0, 1, 2)
    balance.leave(0)  # joining is fine
    balance.request(0)
    balance.grants(0)
    with pytest.raises(RuntimeError, match="actor 0 lost 1"):
        balance.lose(0)
    with pytest.raises(RuntimeError, match="actor 0 began anew"):
        balance.leave(0)
