"""Short whole runs for tests: real threads, processes and sockets, environments whose numbers are known."""

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import tianji_jax
from tianji_jax.config import Config, validate


def counting_config(directory: Path, *overrides: dict[str, Any]) -> Config:
    """A run of the trivial agent on the counting environment, with settings replaced section by section."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"directory": str(directory), "environment_steps": 400, "report_every_seconds": 0.05},
        "environment": {"name": "tianji_jax.testing:CountingEnv", "options": {"episode_length": 5}},
        "actors": {"count": 1, "environments": 4, "unroll_length": 5},
        "learner": {"devices": 1},
        "agent": {"name": "tianji_jax.testing:TrivialAgent"},
    }
    tree["run"]["compilation_cache"] = None
    for override in overrides:
        for section, settings in override.items():
            tree[section] = {**tree.get(section, {}), **settings}
    return validate(tree)


def cartpole_config(directory: Path, *overrides: dict[str, Any]) -> Config:
    """A short run of PPO on CartPole."""
    small = {"network": {"hidden_sizes": [16]}, "epochs": 1, "minibatches": 2, "learning_rate": 1e-3}
    return counting_config(
        directory,
        {
            "environment": {"name": "envpool:CartPole-v1", "options": {}},
            "actors": {"environments": 8, "unroll_length": 16},
            "agent": {"name": "ppo", **small},
        },
        *overrides,
    )


def train(config: Config) -> tuple[tianji_jax.Result, list[dict[str, Any]]]:
    """Run it; the result and all its reports."""
    result = tianji_jax.train(config, show=False)
    lines = (result.path / "metrics.jsonl").read_text().splitlines()
    return result, [json.loads(line) for line in lines]


def values(reports: list[dict[str, Any]], name: str) -> list[Any]:
    """All values of a figure that is not in every report (one without an update since the last has no lag)."""
    return [report[name] for report in reports if name in report]


def free_ports() -> int:
    """A port that is free, and the one after it as well."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port
