"""Where the reports of a run go: `metrics.jsonl`, TensorBoard, Weights & Biases.

Another place is another `Sink`. Nothing here holds up the training: sinks have a thread of their own, and what one
cannot take is counted.
"""

import importlib.util
import json
import logging
import queue
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from tianji_jax.config import Config, ConfigError, MetricsConfig
from tianji_jax.metrics import Report
from tianji_jax.run_folder import METRICS

logger = logging.getLogger(__name__)

BACKLOG = 64
"""Reports that wait for a slow sink, about a minute of them; further ones are lost and counted."""

CLOSE_SECONDS = 2.0
"""How long the sinks get for the last reports."""


class Sink(Protocol):
    """Takes reports, on one thread."""

    def write(self, report: Report) -> None:
        """Take one report; whatever this raises is told once and counted."""

    def close(self) -> None:
        """No report follows."""


class JsonLines:
    """`metrics.jsonl`: one JSON object per report, flushed line by line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, report: Report) -> None:
        """Append one report."""
        self._file.write(json.dumps(report) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Event files that TensorBoard reads, numbered by environment steps."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """
        Args:
          folder: the run's.
          first_step: environment steps at the start; what an earlier process wrote beyond them is not shown.
        """
        from tensorboardX import SummaryWriter
        from tensorboardX.proto.summary_pb2 import Summary

        self._writer = SummaryWriter(str(folder), purge_step=first_step or None, flush_secs=10)
        self._summary = Summary

    def write(self, report: Report) -> None:
        """A scalar for each figure, all in one event: an event of its own for each costs seven times as much."""
        figures = ((name, value) for name, value in report.items() if not isinstance(value, str))
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in figures]
        self._writer.file_writer.add_summary(self._summary(value=scalars), report["environment_steps"])

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; `WANDB_MODE=offline` keeps it on this machine."""

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        """
        Args:
          project: where the run is shown.
          folder: the run's; a run that goes on is recognised by it.
          config: shown beside the run.
        """
        import wandb

        self._run = wandb.init(
            project=project,
            name=folder.name,
            dir=str(folder),
            config=dict(config),
            id=_run_id(folder),
            resume="allow",
            settings=wandb.Settings(quiet=True),
        )

    def write(self, report: Report) -> None:
        """Log all figures."""
        self._run.log(report, step=report["environment_steps"])

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Sinks:
    """All sinks of a run; a context manager. `put` is for any thread and never waits.

    Attributes:
      lost: reports that a sink did not take.
    """

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        """
        Args:
          sinks: by the name that complaints give them.
        """
        self.lost = 0
        self._sinks = dict(sinks)
        self._complained: set[str] = set()
        self._reports: queue.Queue[Report | None] = queue.Queue(BACKLOG)
        self._thread = threading.Thread(target=self._run, name="sinks", daemon=True)

    def put(self, report: Report) -> None:
        """Hand over a report."""
        try:
            self._reports.put_nowait(report)
        except queue.Full:
            self._lose("metrics", "they are slower than the reports come")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._reports.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            pass
        else:
            self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("the last metrics may be missing: a sink did not take them within %g s", CLOSE_SECONDS)

    def _run(self) -> None:
        while (report := self._reports.get()) is not None:
            for name, sink in self._sinks.items():
                self._try(name, lambda sink=sink: sink.write(report))
        for name, sink in self._sinks.items():
            self._try(name, sink.close)

    def _try(self, name: str, do: Any) -> None:
        try:
            do()
        except Exception as error:
            self._lose(name, f"{type(error).__name__}: {error}")

    def _lose(self, name: str, why: str) -> None:
        self.lost += 1
        if name not in self._complained:
            self._complained.add(name)
            logger.warning("%s: a report was lost (%s); others may be, and training goes on", name, why)


def check_installed(metrics: MetricsConfig) -> None:
    """
    Raises:
      ConfigError: a sink that is asked for is not installed.
    """
    if metrics.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        raise ConfigError("metrics.wandb_project: Weights & Biases is not installed: pip install 'tianji_jax[wandb]'")


def open_sinks(folder: Path, config: Config, first_step: int) -> Sinks:
    """The sinks that a run asks for.

    Args:
      folder: the run's.
      config: of the run.
      first_step: environment steps at the start.
    """
    metrics = config.metrics
    sinks: dict[str, Sink] = {METRICS: JsonLines(folder / METRICS)}
    if metrics.tensorboard:
        sinks["TensorBoard"] = TensorBoard(folder, first_step)
    if metrics.wandb_project is not None:
        # No login, no network: the library raises what it likes, and training does not need it.
        try:
            sinks["Weights & Biases"] = WeightsAndBiases(metrics.wandb_project, folder, config.model_dump(mode="json"))
        except Exception as error:
            logger.warning("no reports to Weights & Biases: %s", error)
    return Sinks(sinks)


def _run_id(folder: Path) -> str:
    path = folder / "wandb_id"
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text()
