"""CartPole by 1, 2, 4 and 8 groups that train together: time and steps to the goal, and throughput.

All groups and their root run on this machine and share its cores, so that this shows what fusing costs and how well
what is learned apart fits together; on machines of their own the groups would not slow each other down. Each number of
groups is run `--repeats` times, in turn, with a warm compilation cache.

    python scripts/bench_groups.py [--groups 1,2,4,8] [--repeats 3] [OVERRIDE ...]
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CONFIG = str(ROOT / "configs" / "cartpole_ppo.yaml")
TIANJI = [sys.executable, "-m", "tianji_jax.cli"]


class Outcome(NamedTuple):
    """Of one run of so many groups.

    Attributes:
      seconds: from the start of the first process to the end of the last.
      training: the longest group's own clock, without the imports.
      steps: environment steps of all groups.
      outer_steps: changes that were fused.
      solved: whether the goal was reached.
    """

    seconds: float
    training: float
    steps: int
    outer_steps: int
    solved: bool


def run(groups: int, repeat: int, overrides: list[str]) -> Outcome:
    """Train once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        common = [CONFIG, f"run.directory={folder}", *overrides]
        began = time.monotonic()
        root = None
        if groups > 1:
            common.append(f"groups.root={address}")
            root = _start(["root", *common])
        trainings = [
            _start(["train", *common, f"run.seed={100 * repeat + group}", f"run.name=group{group}"])
            for group in range(groups)
        ]
        codes = [process.wait() for process in [*trainings, *([root] if root else [])]]
        seconds = time.monotonic() - began
        if any(codes):
            raise SystemExit(f"a process ended with {codes}")
        last = [
            json.loads((Path(folder) / f"group{g}" / "metrics.jsonl").read_text().splitlines()[-1])
            for g in range(groups)
        ]
    latest = max(last, key=lambda report: report["environment_steps"])
    means = [report["episode_return"] for report in last]
    return Outcome(
        seconds,
        max(report["wall_seconds"] for report in last),
        latest["environment_steps"],
        latest.get("outer_steps", 0),
        statistics.mean(means) >= 470,  # the last reports are some episodes younger than what the root had heard
    )


def _start(arguments: list[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([*TIANJI, *arguments], stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default="1,2,4,8", help="numbers of groups (1,2,4,8)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each (3)")
    parser.add_argument("overrides", nargs="*", help="section.setting=value, for all")
    options = parser.parse_args()
    numbers = [int(number) for number in options.groups.split(",")]
    run(1, 99, options.overrides)  # fills the compilation cache
    run(2, 99, options.overrides)
    found: dict[int, list[Outcome]] = {number: [] for number in numbers}
    for repeat in range(options.repeats):
        for number in numbers:
            found[number].append(run(number, repeat, options.overrides))
            print(f"{number} groups: {found[number][-1]}, load {os.getloadavg()[0]:.1f}", flush=True)
    print("\n| groups | solved | seconds | seconds of training | environment steps | steps/s | changes fused |")
    print("|---|---|---|---|---|---|---|")
    for number, outcomes in found.items():
        median = {name: statistics.median(getattr(o, name) for o in outcomes) for name in Outcome._fields}
        rate = statistics.median(o.steps / o.training for o in outcomes)
        print(
            f"| {number} | {sum(o.solved for o in outcomes)} of {len(outcomes)} | {median['seconds']:.1f} | "
            f"{median['training']:.1f} | {median['steps']:,.0f} | {rate:,.0f} | {median['outer_steps']:.0f} |"
        )


if __name__ == "__main__":
    main()
