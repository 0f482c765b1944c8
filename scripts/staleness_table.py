"""What staleness costs and brings: return against environment steps and against seconds, for several `max_lag`.

PPO on CartPole with settings under which the actors outrun the learner (many passes over small batches), so that
trajectories wait and become as old as `staleness.max_lag` lets them. With `staleness.correct` their advantages come
from V-trace, without it they are taken as if they were fresh. A Markdown table of means over seeds is printed:

    python scripts/staleness_table.py --seeds 5
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tianji_jax.metrics import Report
from tianji_jax.records import reports_of

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = [
    "actors.count=4",
    "actors.environments=16",
    "actors.unroll_length=32",
    "agent.epochs=30",
    "agent.minibatches=4",
    "run.stop_at_return=null",
    "run.report_every_seconds=0.2",
]
CASES = [(0, True), *((max_lag, correct) for max_lag in (1, 4, 16) for correct in (True, False))]


def run(max_lag: int, correct: bool, seed: int, steps: int, folder: Path) -> list[Report]:
    """The reports of one run in a fresh process."""
    name = f"lag{max_lag}-{'corrected' if correct else 'plain'}-{seed}"
    command = [
        *(sys.executable, "-m", "tianji_jax.cli", "train", str(ROOT / "configs" / "cartpole_ppo.yaml"), *SETTINGS),
        *(f"staleness.max_lag={max_lag}", f"staleness.correct={str(correct).lower()}"),
        *(f"run.seed={seed}", f"run.environment_steps={steps}", f"run.directory={folder}", f"run.name={name}"),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return list(reports_of(folder / name))


def training_seconds(reports: list[Report]) -> list[float]:
    """Time of each report since the last one before the first update: without start and compilation."""
    start = max(report["wall_seconds"] for report in reports if report["learner_steps"] == 0)
    return [report["wall_seconds"] - start for report in reports]


def value_at(at: float, places: list[float], reports: list[Report]) -> float | None:
    """The return in the last report at or before `at`; None before the first episode or beyond the end."""
    if at > places[-1] + 0.2:
        return None
    before = [report for place, report in zip(places, reports, strict=True) if place <= at]
    return before[-1].get("episode_return") if before else None


def mean(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.mean(known):,.0f}" if len(known) == len(values) else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0")
    parser.add_argument("--steps", type=int, default=120_000, help="environment steps of each run")
    parser.add_argument("--at-steps", type=int, nargs="+", default=[30_000, 60_000, 90_000, 120_000])
    parser.add_argument("--at-seconds", type=float, nargs="+", default=[1, 2, 4])
    parser.add_argument("--directory", type=Path, help="keep the runs here")
    options = parser.parse_args()

    heads = ["max_lag", "corrected", "lag, mean", "dropped"]
    heads += [f"return at {steps // 1000}k steps" for steps in options.at_steps]
    heads += [f"at {seconds:g} s" for seconds in options.at_seconds] + ["steps per second"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.directory or Path(scratch)
        for max_lag, correct in CASES:
            runs = [run(max_lag, correct, seed, options.steps, folder) for seed in range(options.seeds)]
            seconds = [training_seconds(reports) for reports in runs]
            steps = [[float(report["environment_steps"]) for report in reports] for reports in runs]
            last = [reports[-1] for reports in runs]
            lag = statistics.mean(r["policy_lag_mean"] for reports in runs for r in reports if "policy_lag_mean" in r)
            cells = [str(max_lag), ("yes" if correct else "no") if max_lag else "", f"{lag:.1f}"]
            cells.append(f"{sum(r['trajectories_dropped'] for r in last)}")
            for at in options.at_steps:
                cells.append(mean([value_at(at, s, r) for s, r in zip(steps, runs, strict=True)]))
            for at in options.at_seconds:
                cells.append(mean([value_at(at, s, r) for s, r in zip(seconds, runs, strict=True)]))
            rates = [r["environment_steps"] / s[-1] for r, s in zip(last, seconds, strict=True)]
            cells.append(f"{statistics.mean(rates):,.0f}")
            print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\nMeans over {options.seeds} seeds, {os.cpu_count()} CPU cores, load {os.getloadavg()[1]:.1f}.")


if __name__ == "__main__":
    main()
