"""CartPole by PPO: tianji_jax against a bare synchronous loop (`scripts/bench_bare_loop.py`), time from process start.

All learn until the mean return of the last 100 episodes is 475: the loop, tianji_jax with the loop's settings, and
`configs/cartpole_ppo.yaml` as it is. Each run is a fresh process, in turn, so that whatever else the machine does falls
on all. Cold: an empty compilation cache for every run. Warm: a cache that a run before has filled.

    python scripts/bench_cartpole.py --seeds 5
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# What bench_bare_loop.py has as its constants.
SETTINGS = [
    "actors.environments=64",
    "actors.unroll_length=32",
    "agent.epochs=4",
    "agent.minibatches=4",
    "agent.optimizer=adam",
    "agent.learning_rate=2e-3",
    "agent.learning_rate_schedule=constant",
    "agent.max_gradient_norm=0.5",
    "agent.clip_epsilon=0.2",
    "agent.entropy_coefficient=0.01",
    "agent.value_coefficient=0.5",
    "agent.discount=0.99",
    "agent.trace_lambda=0.95",
    "run.environment_steps=500_000",
    "run.stop_at_return=475",
]


class Outcome(NamedTuple):
    """One run in a fresh process.

    Attributes:
      seconds: from the start of the process to its end.
      steps: environment steps.
      episode_return: mean of the last 100 episodes.
    """

    seconds: float
    steps: int
    episode_return: float

    @property
    def solved(self) -> bool:
        return self.episode_return >= 475


def run_bare_loop(seed: int, cache: Path, folder: Path) -> Outcome:
    """One run of the bare loop."""
    script = ROOT / "scripts" / "bench_bare_loop.py"
    seconds, output = _time([sys.executable, str(script), f"--seed={seed}", f"--compilation-cache={cache}"])
    result = json.loads(output.splitlines()[-1])
    return Outcome(seconds, result["environment_steps"], result["episode_return"])


def run_tianji(seed: int, cache: Path, folder: Path) -> Outcome:
    """One run of tianji_jax with the settings of the bare loop."""
    return _train(seed, cache, folder / "same", SETTINGS)


def run_as_shipped(seed: int, cache: Path, folder: Path) -> Outcome:
    """One run of tianji_jax with the configuration's own settings."""
    return _train(seed, cache, folder / "shipped", [])


def _train(seed: int, cache: Path, folder: Path, settings: list[str]) -> Outcome:
    run = [f"run.seed={seed}", f"run.compilation_cache={cache}", f"run.directory={folder}", f"run.name=seed{seed}"]
    config = ROOT / "configs" / "cartpole_ppo.yaml"
    seconds, _ = _time([sys.executable, "-m", "tianji_jax.cli", "train", str(config), *settings, *run])
    last = json.loads((folder / f"seed{seed}" / "metrics.jsonl").read_text().splitlines()[-1])
    return Outcome(seconds, last["environment_steps"], last["episode_return"])


def _time(command: list[str]) -> tuple[float, str]:
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return seconds, done.stdout


RUNS = {"bare loop": run_bare_loop, "tianji_jax, its settings": run_tianji, "tianji_jax as shipped": run_as_shipped}


def measure(seeds: range, warm: bool) -> dict[str, list[Outcome]]:
    """Both in turn for each seed; prints each outcome."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as scratch:
        caches = {name: Path(scratch) / f"cache of {name}" for name in RUNS}
        if warm:
            for name, run in RUNS.items():
                run(seeds[0], caches[name], Path(scratch) / "first")
        for seed in seeds:
            for name, run in RUNS.items():
                cache = caches[name] if warm else Path(scratch) / f"cache of {name} {seed}"
                outcome = run(seed, cache, Path(scratch) / "runs")
                outcomes[name].append(outcome)
                print(
                    f"{'warm' if warm else 'cold'}  seed {seed}  {name:25}  {outcome.seconds:5.1f} s  "
                    f"{outcome.steps:7,} steps  return {outcome.episode_return:5.1f}  load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
    return outcomes


def table(measured: dict[str, dict[str, list[Outcome]]]) -> str:
    """Medians as a Markdown table."""
    rows = [
        "| cache | | solved | seconds | steps | steps per second | ratio of seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for cache, outcomes in measured.items():
        base = statistics.median(o.seconds for o in outcomes["bare loop"])
        for name, of_name in outcomes.items():
            seconds = statistics.median(o.seconds for o in of_name)
            steps = statistics.median(o.steps for o in of_name)
            rate = statistics.median(o.steps / o.seconds for o in of_name)
            solved = f"{sum(o.solved for o in of_name)} of {len(of_name)}"
            rows.append(
                f"| {cache} | {name} | {solved} | {seconds:.1f} | {steps:,.0f} | {rate:,.0f} | {seconds / base:.2f} |"
            )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0")
    parser.add_argument("--caches", nargs="+", choices=("warm", "cold"), default=["warm", "cold"])
    options = parser.parse_args()
    measured = {cache: measure(range(options.seeds), cache == "warm") for cache in options.caches}
    print(f"\nMedians over {options.seeds} seeds, {os.cpu_count()} CPU cores:\n\n{table(measured)}")


if __name__ == "__main__":
    main()
