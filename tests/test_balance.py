"""The law of balance, under every order of events hypothesis can think of."""

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from tianji_jax.balance import Balance
from tianji_jax.lock_step import LockStepBalance, Schedule


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


class Restless(World):
    """Actors that hang, come back, lose trajectories and begin anew; counts what became of every credit."""

    def __init__(self, max_lag: int, trajectories: int, actors: int) -> None:
        super().__init__(max_lag, trajectories, actors)
        self.granted = self.settled = self.taken = self.turned_away = 0
        self.revoked: dict[int, int] = dict.fromkeys(range(actors), 0)
        for actor in range(actors):  # as real ones do, they ask for the next credit ahead
            self.balance.request(actor)

    def grant(self) -> None:
        before = len(self.holding)
        super().grant()
        self.granted += len(self.holding) - before
        assert all(not self.revoked[actor] for actor, _ in self.holding[before:])

    def hang(self, index: int) -> None:
        actor = self.holding[index][0]
        self.revoked[actor] += sum(holder == actor and not self.is_revoked(i) for i, (holder, _) in self.numbered())
        self.balance.revoke(actor)

    def numbered(self) -> list[tuple[int, tuple[int, int]]]:
        return list(enumerate(self.holding))

    def is_revoked(self, index: int) -> bool:
        actor = self.holding[index][0]
        return sum(holder == actor for holder, _ in self.holding[:index]) < self.revoked[actor]

    def spend(self, index: int) -> tuple[int, int, bool]:
        """An actor's oldest credit; trajectories of an actor come in order."""
        actor = self.holding[index][0]
        oldest = next(i for i, (holder, _) in self.numbered() if holder == actor)
        late = self.is_revoked(oldest)
        self.revoked[actor] -= late
        self.settled += 1
        return *self.holding.pop(oldest), late

    def deliver(self, index: int) -> None:
        actor, version, late = self.spend(index)
        room = self.balance.outstanding < self.balance.limit
        taken = self.balance.arrive(actor, version)
        assert taken == (room or not late)
        self.taken, self.turned_away = self.taken + taken, self.turned_away + (not taken)
        if taken:
            self.queue.append(version)
        self.balance.request(actor)

    def lose(self, index: int) -> None:
        actor, _, _ = self.spend(index)
        self.balance.lose(actor)
        self.balance.request(actor)

    def begin_anew(self, index: int) -> None:
        actor = self.holding[index][0]
        lost = sum(holder == actor for holder, _ in self.holding)
        assert self.balance.leave(actor) == lost
        self.holding = [(holder, version) for holder, version in self.holding if holder != actor]
        self.revoked[actor] = 0
        self.settled += lost
        self.balance.request(actor)

    def drop_too_old(self) -> None:
        """What the filter does before an update."""
        kept = [version for version in self.queue if self.version - version <= self.balance.max_lag]
        self.balance.release(len(self.queue) - len(kept))
        self.queue = kept

    def check(self) -> None:
        counting = len(self.holding) - sum(self.revoked.values())
        assert self.balance.outstanding == counting + len(self.queue) <= self.balance.limit
        assert self.granted == self.settled + len(self.holding)
        assert len(self.queue) <= self.balance.limit


@given(
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 5),
    st.lists(st.tuples(st.sampled_from("ddduuhhla"), st.integers(0, 100)), min_size=20, max_size=200),
)
def test_the_law_holds_for_what_is_not_taken_back_and_nothing_is_counted_twice(
    max_lag: int, trajectories: int, actors: int, choices: list[tuple[str, int]]
) -> None:
    world = Restless(max_lag, trajectories, actors)
    for what, number in choices:
        world.grant()
        world.check()
        if what == "u":
            world.drop_too_old()
            if len(world.queue) >= trajectories:
                world.update()
        elif world.holding:
            {"d": world.deliver, "h": world.hang, "l": world.lose, "a": world.begin_anew}[what](
                number % len(world.holding)
            )
        world.check()
    event(f"late ones turned away: {world.turned_away > 0}")
    assert max(world.lags, default=0) <= max_lag
    # When all who hang have come back, everybody is served again.
    while world.holding:
        world.deliver(0)
    world.version += max_lag + 1
    world.drop_too_old()
    world.grant()
    assert world.holding


def test_one_that_hangs_gets_nothing_before_it_has_spent_or_lost_what_it_had() -> None:
    balance = Balance(0, 2)
    for actor in (0, 0, 0, 1):
        balance.request(actor)
    assert [actor for actor, _ in balance.grants(0)] == [0, 0]
    balance.revoke(0)
    assert balance.outstanding == 0
    assert [actor for actor, _ in balance.grants(0)] == [1]
    assert balance.arrive(0, 0)  # late, and there is room
    balance.request(1)
    assert balance.grants(0) == []
    assert not balance.arrive(0, 0)  # late, and there is none
    balance.arrive(1, 0)
    balance.release(2)
    assert sorted(actor for actor, _ in balance.grants(1)) == [0, 1]


@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_lock_step_names_the_version_whatever_the_timing(
    max_lag: int, trajectories: int, actors: int, random: object
) -> None:
    balance = LockStepBalance(Schedule(actors, trajectories, max_lag))
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
    balance = LockStepBalance(Schedule(2, 1, 0))
    balance.leave(0)  # joining is fine
    balance.request(0)
    balance.grants(0)
    with pytest.raises(RuntimeError, match="actor 0 lost 1"):
        balance.lose(0)
    with pytest.raises(RuntimeError, match="actor 0 began anew"):
        balance.leave(0)
