"""What groups of runs came to, side by side, for the terminal."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tianji_jax.metrics import RETURN_WINDOW
from tianji_jax.records import NAMES, Group, Record, compact, differing
from tianji_jax.run_folder import is_held

NEAR = 0.1
"""Within this part of the best return counts as reached, where no return is named."""

Row = dict[str, str]
"""Cells by the headings of their columns."""


class Goal(NamedTuple):
    """A return to reach, infinite where no run has shown one, and where it comes from."""

    value: float
    source: str


def compare(groups: Sequence[Group], goal: float | None, console: Console) -> None:
    """Print groups of runs as a table, or as two where one would be too wide.

    Args:
      groups: from `tianji_jax.records.gather`.
      goal: the return to reach; else as in `choose_goal`.
      console: where to.
    """
    chosen = choose_goal([record for group in groups for record in group.records], goal)
    one = _table([{**identity(group), **reaching(group, chosen), **ending(group)} for group in groups])
    # As wide as it would like to be, not as it would be made here.
    if console.measure(one, options=console.options.update(max_width=1000)).maximum <= console.width:
        console.print(one)
    else:
        console.print(_table([{"": group.label, **reaching(group, chosen, stacked=True)} for group in groups]))
        console.print(_table([{**identity(group), **ending(group)} for group in groups]))
    for note in notes(groups, chosen):
        console.print(note, style="dim", highlight=False, markup=False)


def choose_goal(records: Sequence[Record], asked: float | None = None) -> Goal:
    """The return asked for; else `run.stop_at_return`, where the runs name one; else one near the best they had."""
    if asked is not None:
        return Goal(asked, "--return")
    named = [record.settings.get("run.stop_at_return") for record in records]
    stops = {float(value) for value in named if value is not None}
    if len(stops) == 1:
        return Goal(stops.pop(), "run.stop_at_return")
    best = max(float(full_returns(record).max()) for record in records)
    if best == -math.inf:
        return Goal(math.inf, "")
    return Goal(best - NEAR * abs(best), f"within {NEAR:.0%} of the best, {_plain(best)}")


def full_returns(record: Record) -> np.ndarray:
    """`episode_return` where a full window of episodes is behind it, float64 `[reports]`; -inf elsewhere."""
    returns, episodes = record.figures["episode_return"], record.figures["episodes"]
    return np.where((episodes >= RETURN_WINDOW) & np.isfinite(returns), returns, -np.inf)


def reached(record: Record, goal: float) -> int | None:
    """The first report of a mean return of `goal` or more over a full window of episodes; None where there is none."""
    found = np.flatnonzero(full_returns(record) >= goal)
    return int(found[0]) if len(found) else None


def identity(group: Group) -> Row:
    """Whose figures these are."""
    return {"": group.label, "seeds": _spans(sorted({record.settings.get("run.seed", 0) for record in group.records}))}


def reaching(group: Group, goal: Goal, stacked: bool = False) -> Row:
    """What it took to reach the return; stacked: ranges are below medians."""
    at = [reached(record, goal.value) for record in group.records]

    def took(figure: str, shown: Callable[[float], str]) -> str:
        pairs = zip(group.records, at, strict=True)
        values = [math.inf if index is None else float(record.figures[figure][index]) for record, index in pairs]
        return _spread(values, shown, stacked)

    return {
        "reached": f"{sum(index is not None for index in at)} of {len(at)}",
        "after steps": took("environment_steps", compact),
        "frames": took("frames", compact),
        "seconds": took("wall_seconds", _plain),
    }


def ending(group: Group) -> Row:
    """How the runs ended, or stand."""
    records = group.records
    received, dropped = (
        sum(_last(record, name, 0) for record in records) for name in ("trajectories_received", "trajectories_dropped")
    )
    lags = np.concatenate([record.line("environment_steps", "policy_lag_mean")[1] for record in records])
    ends = [(_last(record, "environment_steps", 0), _last(record, "wall_seconds", 0)) for record in records]
    rates = [steps / seconds for steps, seconds in ends if seconds]
    return {
        "last return": _spread([_last(record, "episode_return") for record in records], _plain),
        "steps/s": compact(statistics.median(rates)) if rates else "-",
        "lag": f"{lags.mean():.1f}" if len(lags) else "-",
        "dropped": f"{dropped / received:.1%}" if received else "-",
    }


def notes(groups: Sequence[Group], goal: Goal) -> Iterator[str]:
    """What the columns are, and what else should be known."""
    if math.isfinite(goal.value):
        yield f"reached: a return of {_plain(goal.value)} ({goal.source}), the mean of {RETURN_WINDOW} episodes"
    else:
        yield f"reached: nothing, as no run has finished {RETURN_WINDOW} episodes"
    yield "median (min to max) of the runs; never: not reached"
    yield "steps/s: over the whole run; lag: mean, in versions; dropped: of those received"
    settings = [group.records[0].settings for group in groups]
    if len({one.get(NAMES[0]) for one in settings}) > 1:
        yield "the groups play different environments: their returns do not compare"
    training = [str(record.folder) for group in groups for record in group.records if is_held(record.folder)]
    if training:
        yield f"still training: {', '.join(training)}"
    _, others = differing(settings)
    if others:
        yield f"these differ as well: {', '.join(others)}"


def _table(rows: Sequence[Row]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, heading in enumerate(rows[0]):
        shown.add_column(heading, justify="right" if index else "left", no_wrap=index > 0, overflow="fold")
    for row in rows:
        shown.add_row(*map(Text, row.values()))
    return shown


def _spread(values: Sequence[float], shown: Callable[[float], str], stacked: bool = False) -> str:
    """The median, and the range where there is one. What was not reached is infinite, what is not known NaN."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "-"
    figures = statistics.median(known), min(known), max(known)
    median, low, high = ("never" if math.isinf(figure) else shown(figure) for figure in figures)
    if low == high:
        return median
    return f"{median}\n{low} to {high}" if stacked else f"{median} ({low} to {high})"


def _last(record: Record, name: str, unknown: float = math.nan) -> float:
    """The newest value that is known."""
    known = record.figures[name][np.isfinite(record.figures[name])]
    return float(known[-1]) if len(known) else unknown


def _plain(value: float) -> str:
    """`0.95`, `18.0`, `2,009`."""
    return f"{value:,.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"


def _spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as `0-4, 7`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
