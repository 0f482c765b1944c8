"""Ten minutes under pressure: `make test-slow`."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import jax
import psutil
import pytest

from short_runs import counting_config, train
from tianji_jax.agent import Metrics
from tianji_jax.testing import TrivialAgent
from tianji_jax.types import Batch

MINUTES = float(os.environ.get("TIANJI_SOAK_MINUTES", "10"))


class SlowUpdates(TrivialAgent):
    """Learns at a tenth of the pace of its actors, by waiting on the host in every update."""

    def update(self, train_state: Any, batch: Batch, rng: jax.Array, axis_name: str) -> tuple[Any, Metrics]:
        state, metrics = super().update(train_state, batch, rng, axis_name)
        jax.debug.callback(lambda _: time.sleep(0.02), state.updates)
        return state, metrics


@pytest.mark.slow
@pytest.mark.timeout(MINUTES * 60 + 300)
def test_memory_is_flat_while_actors_outrun_the_learner(tmp_path: Path) -> None:
    config = counting_config(
        tmp_path,
        {
            "run": {"environment_steps": 10**9, "report_every_seconds": 1.0},
            "actors": {"count": 2, "environments": 64, "unroll_length": 16},
            "staleness": {"max_lag": 4},
            "agent": {"name": f"{__name__}:SlowUpdates"},
        },
    )
    process, sizes = psutil.Process(), []

    def watch() -> None:
        end = time.monotonic() + MINUTES * 60
        while time.monotonic() < end:
            time.sleep(1)
            sizes.append(process.memory_info().rss)
        raise_interrupt()

    thread = threading.Thread(target=watch)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        train(config)
    thread.join()
    # A tenth of the time is warm-up.
    warm = sizes[len(sizes) // 10 :]
    early, late = max(warm[: len(warm) // 5]), max(warm[-len(warm) // 5 :])
    assert late < 1.05 * early, f"{early / 2**20:.0f} MiB grew to {late / 2**20:.0f} MiB"


def raise_interrupt() -> None:
    import signal

    signal.raise_signal(signal.SIGINT)
