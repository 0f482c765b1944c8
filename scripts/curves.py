"""Learning curves of runs: return against environment steps, and against seconds, in one picture.

    python scripts/curves.py --output cartpole.png --title "CartPole, PPO" runs/CartPole-v1_ppo runs/CartPole-v1_ppo-2

Runs that share a label (`--labels`, one for each folder) share a colour, as the seeds of one configuration do. Seconds
are counted from the start of the run, after the process has loaded its libraries.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

METRIC = "episode_return"


class Curve(NamedTuple):
    """One run, a point per report."""

    label: str
    steps: list[int]
    seconds: list[float]
    values: list[float]


def read(folder: Path, label: str) -> Curve:
    """The curve of a run from its `metrics.jsonl`; it begins with the first finished episode."""
    curve = Curve(label, [], [], [])
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        report = json.loads(line)
        if report.get(METRIC) is not None:
            curve.steps.append(report["environment_steps"])
            curve.seconds.append(report["wall_seconds"])
            curve.values.append(report[METRIC])
    return curve


def draw(curves: Sequence[Curve], title: str, goal: float | None, output: Path) -> None:
    """Write the picture."""
    labels = list(dict.fromkeys(curve.label for curve in curves))
    colours = {label: f"C{i}" for i, label in enumerate(labels)}
    longest = max(curve.seconds[-1] for curve in curves)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    for curve in curves:
        style = {"color": colours[curve.label], "linewidth": 1.5, "alpha": 0.8}
        left.plot(curve.steps, curve.values, **style)
        right.plot([s / 60 for s in curve.seconds] if longest > 300 else curve.seconds, curve.values, **style)
    for axes in (left, right):
        _decorate(axes, goal)
    left.set_xlabel("environment steps")
    left.set_ylabel("return, mean of 100 episodes")
    left.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    right.set_xlabel("minutes" if longest > 300 else "seconds")
    if len(labels) > 1:
        handles = [plt.Line2D([], [], color=colours[label]) for label in labels]
        figure.legend(handles, labels, frameon=False, loc="outside right upper")
    figure.suptitle(title, fontsize=11)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)


def _decorate(axes: Axes, goal: float | None) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(left=0)
    if goal is not None:
        axes.axhline(goal, color="0.5", linewidth=1, linestyle="--")
        left = axes.get_yaxis_transform()
        axes.text(0.01, goal, f"goal {goal:g}", color="0.4", fontsize=8, va="bottom", transform=left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--labels", nargs="+", help="one for each run")
    parser.add_argument("--title", default="")
    parser.add_argument("--goal", type=float, help="a dashed line at this return")
    parser.add_argument("--output", type=Path, default=Path("curves.png"))
    options = parser.parse_args()
    labels = options.labels or [folder.name for folder in options.runs]
    if len(labels) != len(options.runs):
        parser.error(f"{len(labels)} labels for {len(options.runs)} runs")
    curves = [read(folder, label) for folder, label in zip(options.runs, labels, strict=True)]
    if empty := [str(folder) for folder, curve in zip(options.runs, curves, strict=True) if not curve.values]:
        parser.error(f"no episode finished in {', '.join(empty)}")
    draw(curves, options.title, options.goal, options.output)


if __name__ == "__main__":
    main()
