"""The filter's verdicts and the account."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tianji_jax.staleness import Counts, Ledger, StalenessFilter, Verdict


@given(st.integers(0, 10), st.integers(0, 10), st.integers(0, 100), st.integers(0, 100))
def test_every_lag_gets_the_verdict_its_limits_say(fresh: int, extra: int, policy: int, learner: int) -> None:
    verdict = StalenessFilter(fresh, fresh + extra).judge(policy, learner)
    lag = learner - policy
    if lag < 0:
        assert verdict is Verdict.FUTURE
    elif lag in range(fresh + 1):
        assert verdict is Verdict.FRESH
    elif lag in range(fresh + extra + 1):
        assert verdict is Verdict.STALE
    else:
        assert verdict is Verdict.TOO_OLD


@pytest.mark.parametrize(("fresh", "maximum"), [(1, 0), (-1, 2)])
def test_limits_out_of_order_are_refused(fresh: int, maximum: int) -> None:
    with pytest.raises(ValueError, match=f"got {fresh} and {maximum}"):
        StalenessFilter(fresh, maximum)


def test_the_account_balances_at_every_moment() -> None:
    ledger, stop = Ledger(), threading.Event()
    seen: list[Counts] = []

    def book() -> None:
        for _ in range(2000):
            ledger.queue()
            ledger.queue()
            ledger.consume(1)
            ledger.drop()
            ledger.reject("shape")
        stop.set()

    thread = threading.Thread(target=book)
    thread.start()
    while not stop.is_set():
        seen.append(ledger.counts)
    thread.join()
    seen.append(ledger.counts)
    assert all(c.received == c.consumed + c.dropped + c.rejected + c.queued for c in seen)
    assert seen[-1] == Counts(received=6000, consumed=2000, dropped=2000, rejected=2000, queued=0)
    assert ledger.rejections == {"shape": 2000}
