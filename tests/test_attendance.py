"""When an actor hangs and when nobody acts, by a clock that the test moves."""

import logging

import pytest

from tianji_jax.attendance import FIRST_SECONDS, SILENCE_SECONDS, TICK_SECONDS, UNROLLS, Attendance, NoActorsError
from tianji_jax.config import ActorsConfig


def make(hang_seconds: float = 5.0, wait_seconds: float = 600.0) -> Attendance:
    return Attendance(ActorsConfig(hang_seconds=hang_seconds, wait_seconds=wait_seconds))


def unroll(attendance: Attendance, seconds: float, actor_id: int = 0) -> None:
    attendance.granted(actor_id, 0)
    attendance.tick(seconds)
    assert attendance.overdue(0) == []
    attendance.arrived(actor_id)


def hangs_after(attendance: Attendance, actor_id: int = 0, limit: float = 1000.0) -> float:
    """How long an actor with a credit may take; it hangs then."""
    attendance.granted(actor_id, 0)
    waited = 0.0
    while waited < limit:
        attendance.tick(0.5)
        waited += 0.5
        if found := attendance.overdue(0):
            assert found == [actor_id]
            return waited
    pytest.fail(f"does not hang within {limit} s")


def test_the_first_trajectory_may_take_a_minute() -> None:
    attendance = make()
    attendance.joined(0)
    assert hangs_after(attendance) == FIRST_SECONDS + 0.5


def test_later_ones_may_take_a_multiple_of_the_longest_the_first_left_out() -> None:
    attendance = make()
    unroll(attendance, 50.0)  # with its compilation
    unroll(attendance, 2.0)
    unroll(attendance, 4.0)
    unroll(attendance, 1.0)
    assert hangs_after(attendance) == UNROLLS * 4.0 + 0.5


def test_short_unrolls_leave_hang_seconds() -> None:
    attendance = make(hang_seconds=7.0)
    for _ in range(3):
        unroll(attendance, 0.01)
    assert hangs_after(attendance) == 7.5


def test_one_that_holds_no_credit_does_not_hang() -> None:
    attendance = make()
    unroll(attendance, 0.1)
    attendance.requested(0)
    attendance.tick(10_000.0)
    assert attendance.overdue(0) == []


def test_one_that_waits_for_the_learners_parameters_does_not_hang() -> None:
    attendance = make()
    unroll(attendance, 0.1)
    unroll(attendance, 0.1)
    attendance.granted(0, version=3)
    for _ in range(100):
        attendance.tick(1.0)
        assert attendance.overdue(published=2) == []
    attendance.tick(5.5)
    assert attendance.overdue(published=3) == [0]


def test_hanging_and_coming_back_are_told_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    attendance = make()
    for _ in range(2):
        unroll(attendance, 0.1)
    unroll(attendance, 0.1, actor_id=1)
    assert attendance.connected == 2
    hangs_after(attendance)
    attendance.tick(10.0)
    assert attendance.overdue(0) == []
    assert (attendance.connected, attendance.hung) == (2, 1)
    attendance.arrived(0)
    assert (attendance.connected, attendance.hung) == (2, 0)
    assert [(record.levelname, "actor 0" in record.message) for record in caplog.records] == [
        ("WARNING", True),
        ("INFO", True),
    ]


def test_one_hang_does_not_make_the_next_go_unnoticed_but_slower_actors_are_believed() -> None:
    attendance = make()
    for _ in range(2):
        unroll(attendance, 0.1)
    hangs_after(attendance)
    attendance.tick(3600.0)
    attendance.arrived(0)
    assert hangs_after(attendance) == UNROLLS * 5.0 + 0.5
    attendance.tick(3600.0)
    attendance.arrived(0)
    assert hangs_after(attendance) == UNROLLS**2 * 5.0 + 0.5


@pytest.mark.parametrize("how", ["joined", "left", "lost"])
def test_one_that_begins_anew_or_is_gone_hangs_no_more(how: str) -> None:
    attendance = make()
    hangs_after(attendance)
    getattr(attendance, how)(0)
    assert attendance.hung == 0
    assert attendance.connected == (0 if how == "left" else 1)
    attendance.tick(1000.0)
    assert attendance.overdue(0) == []


def test_who_is_silent_is_looked_for_now_and_then() -> None:
    attendance = make()
    attendance.joined(0)
    attendance.tick(SILENCE_SECONDS / 2)
    attendance.joined(1)
    attendance.tick(SILENCE_SECONDS / 2)
    assert attendance.unheard() == [0]
    assert attendance.unheard() == []
    attendance.tick(SILENCE_SECONDS)
    assert attendance.unheard() == [0, 1]


def test_silence_is_told_and_in_the_end_too_much(caplog: pytest.LogCaptureFixture) -> None:
    attendance = make(wait_seconds=60.0)
    for _ in range(59):
        attendance.tick(1.0)
        attendance.listen(0, waiting=False)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    attendance.listen(1, waiting=False)
    assert "heard of again" in caplog.records[-1].message
    for _ in range(59):
        attendance.tick(1.0)
        attendance.listen(1, waiting=False)
    attendance.tick(1.0)
    with pytest.raises(NoActorsError, match=r"for 60 s, and actors.wait_seconds is 60"):
        attendance.listen(1, waiting=False)


def test_actors_that_wait_for_the_learner_are_not_silent(caplog: pytest.LogCaptureFixture) -> None:
    attendance = make(wait_seconds=60.0)
    for _ in range(1000):
        attendance.tick(1.0)
        attendance.listen(0, waiting=True)
    assert caplog.records == []


def test_time_in_which_the_learner_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("tianji_jax.attendance.time.monotonic", lambda: now)
    attendance = make()
    unroll(attendance, 0.1)
    unroll(attendance, 0.1)
    attendance.granted(0, 0)
    now += 100_000.0
    attendance.tick()
    assert attendance.overdue(0) == []
    attendance.listen(0, waiting=False)
    for _ in range(6):
        now += TICK_SECONDS
        attendance.tick()
    assert attendance.overdue(0) == [0]
