"""Watch a run from another terminal, by the reports it writes."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

from tianji_jax.config import ConfigError, load
from tianji_jax.console import display, heading
from tianji_jax.metrics import Report
from tianji_jax.run_folder import CONFIG, METRICS, is_held

LOOK_SECONDS = 0.5
"""How often new reports are looked for."""


def watch(folder: Path) -> str:
    """Show the reports of a run until it ends; returns how it stands in words.

    Raises:
      ConfigError: there is no run in the folder.
    """
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder}: no run there ({CONFIG} is missing)")
    config = load(folder / CONFIG)
    report: Report | None = None
    with display(config, heading(config), str(folder), show=True) as shown:
        for report in follow(folder):
            shown.show(report)
        if report is not None:
            shown.show(report, final=True)
    return "the run has ended" if report is not None else "the run has ended without a report"


def follow(folder: Path) -> Iterator[Report]:
    """The newest report, and each that is written until the run has ended; all it knows of those before."""
    offset, known = 0, Report()
    while True:
        # Asked before the file is read: what a run writes last, it writes before it lets go.
        running = is_held(folder)
        offset, reports = _read(folder / METRICS, offset)
        for report in reports:
            known |= report
        if reports:
            yield known
        if not running:
            return
        time.sleep(LOOK_SECONDS)


def _read(path: Path, offset: int) -> tuple[int, list[Report]]:
    """The whole lines after `offset`, and where they end. A file that got shorter (a resumed run) is read anew."""
    if not path.exists():
        return 0, []
    with path.open("rb") as file:
        if path.stat().st_size < offset:
            offset = 0
        file.seek(offset)
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]
    return offset + len(whole), [json.loads(line) for line in whole.splitlines()]
