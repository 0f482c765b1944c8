"""What a run shows while it goes: a live panel in a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tianji_jax.config import Config
from tianji_jax.limits import advice
from tianji_jax.metrics import Report

LINE_SECONDS = 5.0
"""Seconds between two plain lines: logs are read later and kept long."""


class Display(Protocol):
    """Shows reports; a context manager that leaves the terminal as it was."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, report: Report, final: bool = False) -> None:
        """Show the newest report."""


def display(config: Config, title: str, subtitle: str, show: bool) -> Display:
    """The display that fits standard output; one that shows nothing unless `show`."""
    if not show:
        return _Nothing()
    console = Console()
    return _Panel(config, title, subtitle, console) if console.is_terminal else _Lines(config, f"{title}\n{subtitle}")


def heading(config: Config) -> str:
    """What a run is about."""
    return f"{config.agent['name']} on {config.environment.name}"


def time_left(config: Config, report: Report) -> float | None:
    """Seconds until `run.environment_steps` at the average rate so far; None while nothing is known."""
    done, seconds = report["environment_steps"], report["wall_seconds"]
    if not done or not seconds:
        return None
    return max(0, config.run.environment_steps - done) * seconds / done


def duration(seconds: float | None) -> str:
    """Seconds as people say them: `42s`, `3m 05s`, `2h 07m`."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


class _Nothing:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, report: Report, final: bool = False) -> None:
        pass


class _Lines:
    def __init__(self, config: Config, title: str) -> None:
        self._config = config
        self._title = title
        self._shown = -LINE_SECONDS

    def __enter__(self) -> Self:
        print(self._title, flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, report: Report, final: bool = False) -> None:
        now = time.monotonic()
        if not final and now - self._shown < LINE_SECONDS:
            return
        self._shown = now
        parts = [
            f"{duration(report['wall_seconds'])}",
            f"steps {report['environment_steps']:,} ({report['environment_steps_per_second']:,.0f}/s)",
            f"updates {report['learner_steps']:,} ({report['learner_steps_per_second']:,.1f}/s)",
        ]
        if "episode_return" in report:
            parts.append(f"return {report['episode_return']:,.1f} ({report['episodes']:,} episodes)")
        if "policy_lag_mean" in report:
            parts.append(f"lag {report['policy_lag_mean']:.1f} (max {report['policy_lag_max']})")
        if report["trajectories_dropped"] or report["trajectories_rejected"]:
            parts.append(f"dropped {report['trajectories_dropped']:,} rejected {report['trajectories_rejected']:,}")
        if report.get("actors_hung"):
            parts.append(_actors(report))
        if "limited_by" in report:
            parts.append(f"limited by {report['limited_by']}")
        if "replay_fill" in report:
            parts.append(f"replay {_replay(report)}")
        parts.append(f"left {duration(time_left(self._config, report))}")
        print("  ".join(parts), flush=True)


class _Panel:
    def __init__(self, config: Config, title: str, subtitle: str, console: Console) -> None:
        self._config = config
        self._title, self._subtitle = title, subtitle
        self._known: Report = {}
        self._live = Live(Text("starting ..."), console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)
        sys.stdout.flush()

    def show(self, report: Report, final: bool = False) -> None:
        # What the newest report does not know stays as it was last known.
        self._known |= report
        self._live.update(self._render(self._known), refresh=final)

    def _render(self, report: Report) -> Panel:
        grid = Table.grid(padding=(0, 3))
        for _ in range(3):
            grid.add_column(justify="left", no_wrap=True)
        grid.add_row(self._progress(report), self._flow(report), self._learning(report))
        steps, limit = report["environment_steps"], self._config.run.environment_steps
        bar = ProgressBar(total=limit, completed=min(steps, limit))
        return Panel(
            Group(grid, _rows(*self._times(report)), bar),
            title=self._title,
            title_align="left",
            subtitle=self._subtitle,
            subtitle_align="left",
            border_style="cyan",
            padding=(0, 1),
        )

    def _times(self, report: Report) -> list[tuple[str, str]]:
        rows = [("frames/s", _rates(report))]
        rows += [(f"{who} time", text) for who in ("actor", "learner") if (text := _shares(report, who))]
        sentence = advice(report, self._config)
        return rows if sentence is None else [*rows, ("limited by", sentence)]

    def _progress(self, report: Report) -> Table:
        goal = self._config.run.stop_at_return
        episode_return = f"{report['episode_return']:,.1f}" if "episode_return" in report else "none yet"
        return _rows(
            ("return", episode_return + (f" / {goal:,.0f}" if goal is not None else "")),
            ("episodes", f"{report['episodes']:,}"),
            ("steps", f"{report['environment_steps']:,}"),
            ("frames", f"{report['frames']:,}"),
            ("time", f"{duration(report['wall_seconds'])}, left {duration(time_left(self._config, report))}"),
        )

    def _flow(self, report: Report) -> Table:
        lag = "none yet"
        if "policy_lag_mean" in report:
            lag = f"{report['policy_lag_min']} / {report['policy_lag_mean']:.1f} / {report['policy_lag_max']}"
        return _rows(
            ("steps/s", f"{report['environment_steps_per_second']:,.0f}"),
            ("updates/s", f"{report['learner_steps_per_second']:,.1f}"),
            ("lag min/mean/max", lag),
            ("queue", f"{report['device_queue_fill']:.0%} of {self._config.learner.queue_capacity}"),
            ("dropped, rejected", f"{report['trajectories_dropped']:,}, {report['trajectories_rejected']:,}"),
            *([("replay", _replay(report))] if "replay_fill" in report else []),
            *([("actors", _actors(report))] if report.get("actors_hung") else []),
        )

    def _learning(self, report: Report) -> Table:
        names = ("loss", "entropy", "kl", "ess", "gradient_norm")
        shown = [(name, f"{report[f'learner/{name}']:.3g}") for name in names if f"learner/{name}" in report]
        return _rows(("version", f"{report['policy_version']:,}"), *shown[:4])


def _rates(report: Report) -> str:
    """Over the last 10 seconds, and over longer ones once there are so many."""
    known = [seconds for seconds, next_shorter in ((60, 10), (300, 60)) if report["wall_seconds"] > next_shorter]
    longer = "".join(f", {report[f'frames_per_second_{seconds}']:,.0f} in {seconds} s" for seconds in known)
    return f"{report['frames_per_second']:,.0f} in 10 s{longer}"


def _shares(report: Report, who: str) -> str:
    """The stages that take most of its time."""
    prefix = f"{who}_time/"
    shares = [(value, name.removeprefix(prefix)) for name, value in report.items() if name.startswith(prefix)]
    return ", ".join(f"{name} {value:.0%}" for value, name in sorted(shares, reverse=True)[:4] if value >= 0.005)


def _replay(report: Report) -> str:
    return f"{report['replay_fill']:.0%} full, {report['samples_per_insert']:.1f} samples/insert"


def _actors(report: Report) -> str:
    return f"{report['actors_hung']:,} of {report['actors_connected']:,} actors hung"


def _rows(*rows: tuple[str, str]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim")
    table.add_column(style="bold")
    for row in rows:
        table.add_row(*row)
    return table
