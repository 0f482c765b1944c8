"""Who takes part, what counts once, and when it is over."""

import numpy as np
import pytest

from tianji_jax.agent import Fused
from tianji_jax.config import GroupsConfig, RunConfig
from tianji_jax.root import Root
from tianji_jax.transport import Answer, Progress, Word


class Groups:
    """A root, and groups that talk to it at given times."""

    def __init__(self, environment_steps: int = 1000, goal: float | None = None, **groups: float) -> None:
        run = RunConfig(environment_steps=environment_steps, stop_at_return=goal)
        self.root = Root(GroupsConfig.model_validate(groups), run)
        self.now = 0.0
        self.name = ""

    def say(
        self, kind: str, group: str, value: float = 0.0, number: int = 1, steps: int = 0, mean: float | None = None
    ) -> Answer:
        brought = Fused([np.float32([value])], np.float32(value)) if kind in ("join", "push") else None
        seed = sum(map(ord, group))
        word = Word(kind, group, seed, number, self.name, Progress(steps, mean), brought)
        answer = self.root.hear(word, self.now)
        self.name = answer.root
        return answer


def value(answer: Answer) -> float:
    assert answer.kind == "fused"
    return float(answer.values.params[0][0])


def test_the_first_gives_its_parameters_and_others_take_them_over() -> None:
    groups = Groups()
    assert value(groups.say("join", "a", 3.0)) == 3
    assert value(groups.say("join", "b", 5.0)) == 3
    assert groups.root.together().groups == 2
    assert value(groups.say("push", "a", 2.0, number=2)) == 4
    answer = groups.say("push", "b", 4.0, number=2)
    assert value(answer) == 6
    assert answer.together.outer_steps == 2


def test_statistics_are_averaged_whatever_the_outer_optimiser() -> None:
    groups = Groups(learning_rate=0.5, momentum=0.9)
    groups.say("join", "a", 0.0)
    answer = groups.say("push", "a", 2.0, number=2)
    assert float(answer.values.statistics) == 2
    assert value(answer) == pytest.approx(0.5 * 2 + 0.5 * 0.9 * 2)


def test_what_is_brought_twice_counts_once() -> None:
    groups = Groups()
    groups.say("join", "a")
    assert [value(groups.say("push", "a", 1.0, number=2)) for _ in range(3)] == [1, 1, 1]
    assert value(groups.say("push", "a", 1.0, number=3)) == 2


def test_a_change_of_other_parameters_does_not_count() -> None:
    groups = Groups()
    groups.say("join", "a")
    groups.name = "an earlier root"
    assert groups.say("push", "a", 1.0, number=2).kind == "join"
    assert value(groups.say("join", "a", 7.0, number=3)) == 0
    assert groups.say("push", "stranger", 1.0).kind == "join"


def test_a_silent_group_does_not_count_until_it_joins_again() -> None:
    groups = Groups(silence_seconds=10)
    groups.say("join", "a")
    groups.say("join", "b", steps=7)
    groups.now = 9
    groups.say("beat", "a")
    groups.now = 11
    groups.root.expire(groups.now)
    together = groups.root.together()
    assert together.groups == 1
    assert together.environment_steps == 7
    # Alone it moves the parameters by all of its change; the other has to catch up first.
    assert value(groups.say("push", "a", 2.0, number=2)) == 2
    assert groups.say("push", "b", 100.0, number=2).kind == "join"
    assert value(groups.say("join", "b", 100.0, number=3)) == 2
    assert groups.root.together().groups == 2


def test_two_groups_of_one_seed_would_act_the_same() -> None:
    groups = Groups()
    groups.say("join", "ab")
    answer = groups.say("join", "ba")
    assert answer.kind == "refused"
    assert "run.seed" in answer.why
    # The same group may join again.
    assert groups.say("join", "ab", number=2).kind == "fused"


def test_each_is_told_the_steps_of_the_others() -> None:
    groups = Groups()
    groups.say("join", "a", steps=10)
    groups.say("join", "b", steps=5)
    together = groups.say("beat", "a", steps=30).together
    assert (together.environment_steps, together.elsewhere, together.over) == (35, 5, False)


def test_the_end_is_that_of_all_together() -> None:
    groups = Groups(environment_steps=100)
    groups.say("join", "a", steps=60)
    assert not groups.say("join", "b", steps=39).together.over
    together = groups.say("beat", "b", steps=40).together
    assert together.over
    assert not together.solved
    assert groups.say("end", "a", steps=60).kind == "standing"
    assert not groups.root.ended
    groups.say("end", "b", steps=50)
    assert groups.root.ended
    assert groups.root.together().environment_steps == 110


def test_the_goal_is_reached_by_the_mean_of_all_and_stays_so() -> None:
    groups = Groups(goal=10)
    groups.say("join", "a", mean=30.0)
    assert groups.say("beat", "a", mean=9.0).together.solved, "it was reached by the first alone"
    groups = Groups(goal=10)
    groups.say("join", "a", mean=9.0)
    groups.say("join", "b")
    assert not groups.say("beat", "a", mean=30.0).together.over, "b has not played enough"
    assert not groups.say("beat", "b", mean=-11.0).together.over
    assert groups.say("beat", "b", mean=-10.0).together.solved
    groups.say("end", "a", mean=30.0)
    assert groups.say("beat", "b", mean=-10.0).together.solved


def test_a_group_that_pauses_is_waited_for() -> None:
    groups = Groups()
    groups.say("join", "a", steps=5)
    groups.say("pause", "a", steps=6)
    assert groups.root.together().groups == 0
    assert not groups.root.ended
    assert value(groups.say("join", "a", 9.0, number=2, steps=6)) == 0
    groups.say("end", "a", steps=8)
    assert groups.root.ended
