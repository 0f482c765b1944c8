"""What runs have reported: read from their folders, and gathered into groups by what they have in common."""

import json
import logging
import math
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import yaml

from tianji_jax.config import ConfigError, flatten
from tianji_jax.run_folder import CONFIG, METRICS

if TYPE_CHECKING:
    from tianji_jax.metrics import Report

logger = logging.getLogger(__name__)

FIGURES = (
    "environment_steps",
    "frames",
    "wall_seconds",
    "episodes",
    "episode_return",
    "environment_steps_per_second",
    "policy_lag_min",
    "policy_lag_mean",
    "policy_lag_max",
    "trajectories_received",
    "trajectories_dropped",
    "learner/entropy",
    "learner/ess",
    "learner/kl",
    "learner/loss",
)
"""What is read of a report; the rest of a long run would fill the memory."""

LINE_BYTES = 2000
"""A report is shorter."""

OF_ONE_RUN = {"run.seed", "run.name", "run.directory"}
"""Settings in which the runs of a group may differ."""

NAMES = ("environment.name", "agent.name")
"""These bring many other settings with them: where they differ, they tell groups apart and the others need not."""

Settings = Mapping[str, Any]
"""Values of a configuration by dotted name."""


@dataclass(frozen=True, eq=False)
class Record:
    """The reports of one run.

    Attributes:
      folder: the run's.
      settings: of its `config.yaml`; empty where that is missing.
      figures: float64 `[reports]` by the names in `FIGURES`; NaN where a report does not know it.
    """

    folder: Path
    settings: Settings
    figures: Mapping[str, np.ndarray]

    @property
    def reports(self) -> int:
        """How many there are."""
        return len(self.figures[FIGURES[0]])

    def line(self, x: str, *names: str) -> tuple[np.ndarray, ...]:
        """Columns of the reports that know all of these figures: `x`, which never falls, and the others."""
        columns = np.stack([self.figures[name] for name in (x, *names)])
        columns = columns[:, np.isfinite(columns).all(axis=0)]
        return np.maximum.accumulate(columns[0]), *columns[1:]


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ in nothing but their seed, or that were given the same label."""

    label: str
    records: tuple[Record, ...]

    @property
    def size(self) -> str:
        """Such as `3 seeds`; `3 runs`, if some have the same seed."""
        count = len(self.records)
        noun = "seed" if len({record.settings.get("run.seed") for record in self.records}) == count else "run"
        return f"{count} {noun}{'s' if count > 1 else ''}"


def reports_of(folder: Path, most: int | None = None) -> "Iterator[Report]":
    """The reports of a run, which may be training meanwhile: a line that is cut off is left out.

    Args:
      folder: the run's.
      most: of a file that is much longer take only about so many, evenly spread: it costs the same at any length.

    Raises:
      OSError: they cannot be read.
    """
    with (folder / METRICS).open("rb") as file:
        for line in _lines(file, most):
            try:
                report = json.loads(line)
            except ValueError:
                continue
            if isinstance(report, dict):
                yield report


def read(folder: Path, most: int | None = None) -> Record:
    """The record of a run; one without reports, if it has none yet. `most` as in `reports_of`.

    Raises:
      ConfigError: its files cannot be read.
    """
    values = array("d")
    try:
        for report in reports_of(folder, most):
            values.extend(_number(report.get(name)) for name in FIGURES)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f"{folder / METRICS} cannot be read: {error.strerror}") from None
    table = np.array(values).reshape(-1, len(FIGURES))
    return Record(folder, _settings(folder / CONFIG), dict(zip(FIGURES, table.T, strict=True)))


def gather(paths: Sequence[Path], labels: Sequence[str] = ()) -> list[Group]:
    """Groups of runs, in the order in which they are met first.

    Args:
      paths: folders of runs, or folders that hold them, of which those without a report are left out.
      labels: one for each path, or one for all; without them groups are called after what differs between them.

    Raises:
      ConfigError: there is no run, one of `paths` has no report, or the labels do not fit; a line for each problem.
    """
    if len(labels) not in (0, 1, len(paths)):
        raise ConfigError(
            f"--label: got {len(labels)} for {len(paths)} folders; give one for each of them, or one for all"
        )
    labels = [labels[0]] * len(paths) if len(labels) == 1 else labels
    found: dict[Path, tuple[Record, str]] = {}
    problems = []
    for index, path in enumerate(paths):
        try:
            for record in _runs(path):
                found.setdefault(record.folder.resolve(), (record, labels[index] if labels else ""))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    gathered: dict[str, list[Record]] = {}
    for record, label in found.values():
        gathered.setdefault(label if labels else _common(record.settings), []).append(record)
    if labels:
        return [Group(label, tuple(records)) for label, records in gathered.items()]
    groups = [tuple(records) for records in gathered.values()]
    names = _labels([records[0].settings for records in groups])
    return [Group(name, records) for name, records in zip(names, groups, strict=True)]


def differing(settings: Sequence[Settings]) -> tuple[list[str], list[str]]:
    """Settings that tell groups apart, and others that differ as well because the environment or the agent does."""
    every = list(dict.fromkeys(name for one in settings for name in (*NAMES, *one) if name not in OF_ONE_RUN))
    differ = [name for name in every if len({_shown(one, name) for one in settings}) > 1]
    kinds: dict[tuple[str, ...], list[Settings]] = {}
    for one in settings:
        kinds.setdefault(tuple(_shown(one, name) for name in NAMES), []).append(one)
    telling = [
        name
        for name in differ
        if name in NAMES or any(len({_shown(one, name) for one in kind}) > 1 for kind in kinds.values())
    ]
    return telling, [name for name in differ if name not in telling and all(name in one for one in settings)]


def compact(value: float, digits: int = 3) -> str:
    """A number as people write it beside others: `74.3k`, `3.13M`, `475`, `0.95`."""
    value = float(f"{value:.{digits}g}")
    for exponent, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**exponent:
            return f"{value / 10**exponent:.{digits}g}{prefix}"
    return f"{value:.{digits}g}"


def _lines(file: BinaryIO, most: int | None) -> Iterator[bytes]:
    size = os.fstat(file.fileno()).st_size
    if most is None or size <= most * LINE_BYTES:
        yield from file
        return
    for start in range(0, size, -(-size // most)):
        file.seek(max(start - 1, 0))
        if start:
            file.readline()  # the rest of a line that began before
        yield file.readline()


def _number(value: Any) -> float:
    """NaN for all that cannot be drawn."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def _settings(path: Path) -> Settings:
    """Not as a `Config`: a run of another version, or of an agent that is not at hand, can be drawn all the same."""
    try:
        tree = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections (run, environment, actors, agent ...)")
    return dict(flatten(tree))


def _runs(path: Path) -> list[Record]:
    """The run in a folder, or the runs in its folders that have reports."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder")
    if (path / METRICS).exists() or (path / CONFIG).exists():
        record = read(path)
        if not record.settings:
            raise ConfigError(f"{path}: {CONFIG} is missing or empty")
        if not record.reports:
            raise ConfigError(f"{path}: the run has no report yet")
        return [record]
    runs = [read(folder) for folder in sorted(path.iterdir()) if (folder / METRICS).exists()]
    found = [run for run in runs if run.settings and run.reports]
    if not found:
        raise ConfigError(f"{path}: no run there, nor in its folders ({METRICS} is missing or empty)")
    for run in runs:
        if run not in found:
            logger.warning("%s is left out: it has no %s", run.folder, "report yet" if run.settings else CONFIG)
    return found


def _common(settings: Settings) -> str:
    """What is the same for all runs of a group."""
    return json.dumps({name: value for name, value in settings.items() if name not in OF_ONE_RUN}, sort_keys=True)


def _labels(settings: Sequence[Settings]) -> list[str]:
    if len(settings) == 1:
        return [f"{settings[0].get('agent.name')} on {settings[0].get('environment.name')}"]
    telling, _ = differing(settings)
    return [", ".join(_shown(one, name) for name in telling) for one in settings]


def _shown(settings: Settings, name: str) -> str:
    """A setting as one would write it on the command line."""
    if name not in settings:
        return f"{name} not set"
    value = settings[name]
    return f"{name}={value if isinstance(value, str) else json.dumps(value, default=str)}"
