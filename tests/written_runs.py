"""Folders of runs that never ran: reports and configurations for tests that need particular ones."""

import json
from pathlib import Path
from typing import Any

import yaml


def report(step: int, **figures: Any) -> dict[str, Any]:
    """A report at so many environment steps, of 4 frames each, a hundred a second."""
    return {
        "wall_seconds": step / 100,
        "environment_steps": step,
        "frames": 4 * step,
        "episodes": step,
        "environment_steps_per_second": 100.0,
        **figures,
    }


def write_run(
    folder: Path, reports: list[dict[str, Any]], seed: int = 0, stop_at_return: float | None = None, **sections: Any
) -> Path:
    """A run with these reports and, beside what is given, the least that a configuration has."""
    tree = {
        "run": {"directory": str(folder.parent), "name": folder.name, "seed": seed, "stop_at_return": stop_at_return},
        "environment": {"name": "envpool:Pong-v5", "options": {}},
        "agent": {"name": "ppo", "learning_rate": 3e-4},
        **sections,
    }
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(report) + "\n" for report in reports))
    return folder
