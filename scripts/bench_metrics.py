"""What measuring costs: one training run whose metrics are turned off and on in turn, every few seconds.

Off, no stage is timed, no report is made and nothing is written. A spell begins and ends when a batch is counted, so
that its rate is that of whole batches. Printed is the ratio of the mean rates with metrics and without, and its 95 %
interval (bootstrap over pairs of neighbouring spells).

    python scripts/bench_metrics.py [--pairs 40] [--seconds 1.5] [CONFIG [OVERRIDE ...]]
"""

import argparse
import contextlib
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import tianji_jax
from tianji_jax import run as running
from tianji_jax.metrics import Meter
from tianji_jax.run import Run
from tianji_jax.sinks import Sinks
from tianji_jax.stopwatch import Stopwatch

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "cartpole_ppo.yaml"
NO_STAGE = contextlib.nullcontext()


class Switch:
    """Turns everything that measures off and on, in a run that goes on meanwhile."""

    def __init__(self) -> None:
        self.on = True
        self.meter: Meter
        self._replace(Stopwatch, "__call__", NO_STAGE)
        self._replace(Meter, "spent", None)
        self._replace(Sinks, "put", None)
        self._replace(Run, "_report", {"environment_steps": 0, "learner_steps": 0})
        meter = running.Meter

        def make(*arguments: Any) -> Meter:
            self.meter = meter(*arguments)
            return self.meter

        running.Meter = make  # type: ignore[assignment, misc]

    def _replace(self, where: type, method: str, nothing: Any) -> None:
        measured = getattr(where, method)

        def switched(*arguments: Any, **details: Any) -> Any:
            return measured(*arguments, **details) if self.on else nothing

        setattr(where, method, switched)

    def rate(self, on: bool, seconds: float) -> float:
        """Environment steps per second during one spell."""
        self.on = on
        time.sleep(0.2)
        began, steps = self._next_batch()
        time.sleep(seconds)
        ended, more = self._next_batch()
        return (more - steps) / (ended - began)

    def _next_batch(self) -> tuple[float, int]:
        """When the next batch is counted, and the environment steps with it."""
        before = self.meter.environment_steps
        while self.meter.environment_steps == before:
            time.sleep(5e-4)
        return time.perf_counter(), self.meter.environment_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path, default=CONFIG)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a spell")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        endless = ["run.environment_steps=1_000_000_000", "run.stop_at_return=null", f"run.directory={scratch}"]
        config = tianji_jax.load(options.config, [*options.overrides, *endless])
        switch = Switch()
        run = threading.Thread(target=tianji_jax.train, args=(config,), kwargs={"show": False}, daemon=True)
        run.start()
        while not getattr(switch, "meter", None) or switch.meter.environment_steps < 50_000:
            time.sleep(0.1)
        pairs = []
        for pair in range(options.pairs):
            order = (True, False) if pair % 2 else (False, True)
            rates = {on: switch.rate(on, options.seconds) for on in order}
            pairs.append((rates[True], rates[False]))
            ratio = rates[True] / rates[False]
            print(f"on {rates[True]:9,.0f}/s  off {rates[False]:9,.0f}/s  ratio {ratio:.3f}", flush=True)
        on, off = np.mean(pairs, axis=0)
        draws = np.random.default_rng(0).choice(pairs, (10_000, len(pairs))).mean(axis=1)
        low, high = np.quantile(draws[:, 0] / draws[:, 1], [0.025, 0.975])
        print(
            f"ratio on/off {on / off:.4f} (95 % interval {low:.4f} to {high:.4f}), "
            f"{options.pairs} pairs, load {os.getloadavg()[0]:.1f}"
        )
        switch.on = True
        os._exit(0)


if __name__ == "__main__":
    main()
