"""Pictures of runs: `curves.png` of one while it trains, and groups of runs side by side.

Matplotlib's objects are used by themselves, without pyplot and without global state, so that any thread may draw.
"""

import contextlib
import gc
import io
import os
import textwrap
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from tianji_jax.config import ConfigError
from tianji_jax.records import NAMES, Group, Record, compact, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE = "curves.png"

FORMATS = (".png", ".pdf", ".svg")

MAX_POINTS = 1000
"""Of a line in the picture of one run: about two for each pixel."""

MAX_REPORTS = 2000
"""That `curves.png` is drawn from, evenly spread over a run that has more: it must not hold up the training."""

GROUP_POINTS = 400
"""Of a line in pictures of groups: one for each of its widths; more would be a smear."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which also the colour-blind tell apart; without the yellow, too pale on white."""

STYLES = ("solid", "dashed", "dotted", "dashdot")
"""Of lines, once all colours are used."""

GREY = "0.3"

HEALTH = {
    "learner/entropy": "entropy of the policy",
    "learner/ess": "effective sample size, share of the batch",
    "learner/kl": "KL divergence",
    "learner/loss": "loss",
}
"""How a learner fares: the first two that a run knows are drawn."""

RETURN, RATE, LAG = "episode_return", "environment_steps_per_second", "policy_lag_mean"

WIDTH = 3.5
"""Inches of a picture of groups: a column of a paper."""

LEGEND_CHARACTERS, HEADING_CHARACTERS = 54, 80
"""That go across a picture of groups, and across one of a run."""

LEGEND_LINE, LEGEND_GAP = 0.12, 0.03
"""Inches: how high a line of text is, and what is between two labels."""

Across = Literal["steps", "frames", "seconds"]

Line = tuple[np.ndarray, np.ndarray]
"""Float64 `[points]`: x, which never falls, and y."""


class Scale(NamedTuple):
    """What pictures are drawn against: a figure of the reports, by what it is divided, and how that is called."""

    figure: str
    unit: float
    name: str


class Band(NamedTuple):
    """Several lines where all have points: float64 `[GROUP_POINTS]` each."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def draw_run(folder: Path) -> None:
    """Draw `curves.png` in a run's folder, which may be training meanwhile; nothing before its first report.

    Raises:
      ConfigError: the run's files cannot be read.
      OSError: the picture cannot be written; the one before stays.
    """
    record = read(folder, MAX_REPORTS)
    if not record.reports:
        return
    # A picture is a web of cycles, some megabytes. It goes while it is young: a run looks for no older garbage.
    gc.collect(0)
    save(run_figure(record), folder / PICTURE)
    gc.collect(0)


def plot(groups: Sequence[Group], output: Path, across: Across, title: str | None, goal: float | None) -> None:
    """Draw groups of runs, as `group_figure`, into a .png, .pdf or .svg file, which is replaced if it exists.

    Raises:
      ConfigError: the file cannot be written.
    """
    if output.suffix not in FORMATS:
        raise ConfigError(f"--output: got {output}; its name should end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        save(group_figure(groups, across, title, goal), output)
    except OSError as error:
        raise ConfigError(f"--output: cannot write {output}: {error.strerror}") from None


def save(figure: "Figure", path: Path) -> None:
    """Write a picture in the format that its name ends in; whoever looks meanwhile sees the one before.

    Raises:
      OSError: it cannot be written.
    """
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.removeprefix("."), facecolor="white")
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        partial.write_bytes(picture.getvalue())
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def run_figure(record: Record) -> "Figure":
    """One run against environment steps: return, throughput, policy lag, and how its learner fares."""
    health = [name for name in HEALTH if np.isfinite(record.figures[name]).any()][:2]
    below = 0.38 if health else 0.1
    half = (0.9 - below) / 2
    figure = _figure(8.0, 5.0, dpi=100)
    panels = {
        RETURN: _panel(figure, (0.07, below, 0.42, 2 * half), 9, title="return, mean of 100 episodes"),
        RATE: _panel(figure, (0.56, below + half + 0.06, 0.42, half - 0.06), 9, title="environment steps/s"),
        LAG: _panel(figure, (0.56, below, 0.42, half - 0.06), 9, title="policy lag in versions: mean, min to max"),
    }
    for index, name in enumerate(health):
        panels[name] = _panel(figure, (0.07 + 0.49 * index, 0.1, 0.42, 0.185), 9, title=HEALTH[name])
    scale = _scale([record], "steps")
    for name, axes in panels.items():
        _draw(axes, thin(_line(record, scale, name), MAX_POINTS), color=COLOURS[0], linewidth=1.4)
    x, youngest, oldest = record.line(scale.figure, "policy_lag_min", "policy_lag_max")
    (at, low), (_, high) = thin((x, youngest), MAX_POINTS, np.minimum), thin((x, oldest), MAX_POINTS, np.maximum)
    panels[LAG].fill_between(at, low, high, color=COLOURS[0], alpha=0.2, linewidth=0)
    _finish(panels, [record], scale, record.settings.get("run.stop_at_return"))
    for name in health or (RETURN, LAG):
        panels[name].set_xlabel(scale.name, fontsize=9, color=GREY)
    heading = f"{record.folder.resolve().name}: {common([record])}"
    heading = heading if len(heading) <= HEADING_CHARACTERS else f"{heading[: HEADING_CHARACTERS - 3]}..."
    figure.text(0.07, 0.96, heading, fontsize=10, parse_math=False)
    return figure


def group_figure(
    groups: Sequence[Group], across: Across = "steps", title: str | None = None, goal: float | None = None
) -> "Figure":
    """Groups of runs: return, policy lag and throughput, one above the other, as wide as a column of a paper.

    A line is the mean of a group's runs where all of them have points, in a band from the lowest to the highest.
    Elsewhere, when some have ended, each of the others is a thin line: their mean would jump.

    Args:
      groups: what to draw.
      across: what to draw them against.
      title: what all have in common, if it is not given.
      goal: a dashed line at this return.
    """
    records = [record for group in groups for record in group.records]
    if title is None:
        title = common(records) if len(groups) > 1 else ""
    texts = [_legend_text(group) for group in groups]
    if any(len(group.records) > 1 for group in groups):
        texts.append("line: mean, band: min to max, thin: single runs")
    below_title = 3.83 + sum(LEGEND_LINE * (text.count("\n") + 1) + LEGEND_GAP for text in texts)
    height = below_title + (0.27 if title else 0.08)
    figure = _figure(WIDTH, height, dpi=300)
    panels = {}
    # In inches: where a panel begins from below, and how high it is.
    places = {RETURN: ("return", 2.1, 1.65), LAG: ("policy lag", 1.25, 0.75), RATE: ("steps/s", 0.4, 0.75)}
    for name, (label, start, high) in places.items():
        panels[name] = _panel(figure, (0.52 / WIDTH, start / height, 1 - 0.68 / WIDTH, high / height), 7.5)
        panels[name].set_ylabel(label, fontsize=7.5, color=GREY)
        panels[name].yaxis.set_label_coords(-0.36 / (WIDTH - 0.68), 0.5)
        panels[name].tick_params(labelbottom=name == RATE)
    scale = _scale(records, across)
    for name, axes in panels.items():
        for index, group in enumerate(groups):
            lines = [thin(_line(record, scale, name), GROUP_POINTS) for record in group.records]
            _draw_group(axes, [line for line in lines if len(line[0])], _style(index))
    _finish(panels, records, scale, goal)
    panels[RATE].set_xlabel(scale.name, fontsize=7.5, color=GREY, labelpad=2)
    _legend(figure, texts, len(groups), below_title / height)
    figure.text(0.1 / WIDTH, 1 - 0.2 / height, title, fontsize=8.5, parse_math=False)
    return figure


def common(records: Sequence[Record]) -> str:
    """Agent and environment, as far as all runs have the same: `ppo on envpool:CartPole-v1`."""
    found = [{record.settings.get(name) for record in records} for name in reversed(NAMES)]
    return " on ".join(str(values.pop()) for values in found if len(values) == 1 and None not in values)


def thin(line: Line, points: int, reduce: np.ufunc = np.add) -> Line:
    """A line with no more than so many points: stretches of it by their last x and their mean y.

    Args:
      line: of any length.
      points: 1 or more.
      reduce: `np.minimum` or `np.maximum` for these in place of the mean.
    """
    x, y = line
    if len(x) <= points:
        return line
    starts = np.linspace(0, len(x), points, endpoint=False).astype(int)
    ends = np.append(starts[1:], len(x))
    reduced = reduce.reduceat(y, starts)
    return x[ends - 1], reduced / (ends - starts) if reduce is np.add else reduced


def band(lines: Sequence[Line]) -> Band | None:
    """Mean, lowest and highest of lines, interpolated where all have points; None where there is no such place."""
    start, end = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
    if start >= end:
        return None
    grid = np.linspace(start, end, GROUP_POINTS)
    values = np.stack([np.interp(grid, x, y) for x, y in lines])
    return Band(grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0))


def _line(record: Record, scale: Scale, name: str) -> Line:
    x, y = record.line(scale.figure, name)
    return x / scale.unit, y


def _scale(records: Sequence[Record], across: Across) -> Scale:
    if across == "steps":
        return Scale("environment_steps", 1, "environment steps")
    if across == "frames":
        return Scale("frames", 1, "frames")
    longest = _end(records, "wall_seconds")
    unit, name = (1, "seconds") if longest <= 300 else (60, "minutes") if longest <= 10_800 else (3600, "hours")
    return Scale("wall_seconds", unit, name)


def _end(records: Sequence[Record], figure: str) -> float:
    return float(max(np.nanmax(record.figures[figure], initial=0) for record in records))


def _style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index // len(COLOURS) % len(STYLES)]}


def _figure(width: float, height: float, dpi: int) -> "Figure":
    # Loaded here, as only those need it who draw.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _panel(figure: "Figure", rect: tuple[float, float, float, float], size: float, title: str = "") -> "Axes":
    """Empty axes in a part of the figure (left, bottom, width, height), with text of so many points."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes = figure.add_axes(rect, facecolor="white")
    # A given y saves the search for one beside the ticks, which takes a tenth of the drawing.
    axes.set_title(title, loc="left", fontsize=size, color="black", pad=4, y=1.0)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(color="0.5", linewidth=0.7)
    axes.tick_params(labelsize=size - 0.5, labelcolor=GREY, color="0.5", length=2.5, width=0.7, pad=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: compact(value, 6).replace("-", "\N{MINUS SIGN}")))
    return axes


def _draw(axes: "Axes", line: Line, **style: Any) -> None:
    """A line, or the only point there is."""
    x, y = line
    if len(x):
        axes.plot(x, y, marker="o" if len(x) == 1 else None, markersize=3, **style)


def _draw_group(axes: "Axes", lines: Sequence[Line], style: Mapping[str, Any]) -> None:
    """One line, or mean and band of several, with those thin that go beyond."""
    together = band(lines) if len(lines) > 1 else None
    if together is None:
        for line in lines:
            _draw(axes, line, **style, linewidth=1.2 if len(lines) == 1 else 0.6)
        return
    axes.fill_between(together.x, together.low, together.high, color=style["color"], alpha=0.2, linewidth=0)
    axes.plot(together.x, together.mean, **style, linewidth=1.2)
    start, end = together.x[[0, -1]]
    for x, y in lines:
        edges = np.interp([start, end], x, y)
        before, after = x < start, x > end
        if before.any():
            axes.plot([*x[before], start], [*y[before], edges[0]], **style, linewidth=0.6)
        if after.any():
            axes.plot([end, *x[after]], [edges[1], *y[after]], **style, linewidth=0.6)


def _finish(panels: Mapping[str, "Axes"], records: Sequence[Record], scale: Scale, goal: float | None) -> None:
    """Limits, the goal, and words where there is nothing to draw."""
    for name, words in ((RETURN, "no episode has finished"), (LAG, "no update yet")):
        if not panels[name].lines:
            panels[name].text(0.5, 0.5, words, transform=panels[name].transAxes, ha="center", color=GREY)
            panels[name].set_yticks([])
    for name in (RATE, LAG):
        panels[name].set_ylim(0, max(panels[name].get_ylim()[1], 1))
    for axes in panels.values():
        axes.set_xlim(0, 1.02 * _end(records, scale.figure) / scale.unit or 1)
    if goal is not None and panels[RETURN].lines:
        axes = panels[RETURN]
        axes.axhline(goal, color="0.4", linewidth=0.8, linestyle=(0, (4, 3)), zorder=6)
        place = axes.get_yaxis_transform()
        behind = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.5}
        style: dict[str, Any] = {"fontsize": 7, "color": GREY, "va": "bottom", "zorder": 5, "bbox": behind}
        axes.text(0.01, goal, f"goal {goal:g}", transform=place, **style)


def _legend_text(group: Group) -> str:
    silent = sum(not np.isfinite(record.figures[RETURN]).any() for record in group.records)
    among = f"{silent} with " if silent < len(group.records) else ""
    text = f"{group.label} ({group.size}{f', {among}no finished episode' if silent else ''})"
    return textwrap.fill(text, LEGEND_CHARACTERS, break_on_hyphens=False)


def _legend(figure: "Figure", texts: Sequence[str], groups: int, top: float) -> None:
    """A line for each group, and one for what lines and bands are; from `top` downwards."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Line2D([], [], linewidth=1.2, **_style(index)) for index in range(groups)]
    if len(texts) > groups:
        handles.append((Patch(color=GREY, alpha=0.2, linewidth=0), Line2D([], [], linewidth=1.2, color=GREY)))
    legend = figure.legend(
        handles,
        texts,
        loc="upper left",
        bbox_to_anchor=(0.1 / WIDTH, top),
        frameon=False,
        fontsize=7,
        labelcolor=GREY,
        handlelength=1.6,
        handletextpad=0.6,
        labelspacing=0.3,
        borderaxespad=0,
        borderpad=0,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
