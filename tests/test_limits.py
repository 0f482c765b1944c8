"""The report names the stage that limits a run: each one is slowed down in turn, in whole runs."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from short_runs import counting_config, train
from tianji_jax.checkpoint import Checkpoints, Snapshot
from tianji_jax.limits import advice, what_limits
from tianji_jax.testing import TrivialAgent
from tianji_jax.transport import ParameterServer
from tianji_jax.types import PyTree

SLOW_SECONDS = 0.02
"""Longer than all other stages of one unroll and one update together."""


class SlowPolicy(TrivialAgent):
    """Takes its time to act."""

    def act(self, params: PyTree, rng: jax.Array, observation: PyTree, is_first: jax.Array, state: PyTree) -> Any:
        action, extras, state = super().act(params, rng, observation, is_first, state)

        def wait(action: np.ndarray) -> np.ndarray:
            time.sleep(2e-3)
            return action

        return jax.pure_callback(wait, jax.ShapeDtypeStruct(action.shape, action.dtype), action), extras, state


class SlowUpdate(TrivialAgent):
    """Takes its time to learn, by work: a callback would have its caller wait."""

    def update(self, train_state: Any, batch: Any, rng: jax.Array, axis_name: str) -> Any:
        state, metrics = super().update(train_state, batch, rng, axis_name)
        work = jax.lax.fori_loop(0, 30, lambda _, x: jnp.tanh(x @ x), jnp.full((600, 600), metrics["loss"]))
        return state, {**metrics, "work": jnp.mean(work)}


def slow_down(monkeypatch: pytest.MonkeyPatch, where: type, method: str) -> None:
    quick: Callable[..., Any] = getattr(where, method)

    def slow(*arguments: Any) -> Any:
        time.sleep(SLOW_SECONDS)
        return quick(*arguments)

    monkeypatch.setattr(where, method, slow)


def limited_by(tmp_path: Path, *overrides: dict[str, Any]) -> str:
    """The stage named by the last report of a run whose own stages take next to nothing."""
    quick = {"run": {"environment_steps": 2000}, "staleness": {"max_lag": 4}}
    config = counting_config(tmp_path, quick, *overrides)
    reports = train(config)[1]
    sentence = advice(reports[-1], config)
    assert sentence is not None
    stage: str = reports[-1]["limited_by"]
    assert sentence.startswith(f"{stage}: ")
    return stage


def test_slow_environments(tmp_path: Path) -> None:
    assert limited_by(tmp_path, {"environment": {"options": {"step_seconds": 1e-3}}}) == "environments"


def test_a_slow_policy(tmp_path: Path) -> None:
    assert limited_by(tmp_path, {"agent": {"name": f"{__name__}:SlowPolicy"}}) == "inference"


def test_a_slow_update(tmp_path: Path) -> None:
    assert limited_by(tmp_path, {"agent": {"name": f"{__name__}:SlowUpdate"}}) == "update"


def test_slow_publishing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, ParameterServer, "publish")
    assert limited_by(tmp_path) == "publishing"


def test_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(self: Checkpoints, snapshot: Snapshot) -> None:
        time.sleep(SLOW_SECONDS)

    monkeypatch.setattr(Checkpoints, "_save", save)
    short = {"run": {"environment_steps": 600}, "checkpoint": {"every_learner_steps": 1}}
    assert limited_by(tmp_path, short) == "checkpoints"


def test_little_credit(tmp_path: Path) -> None:
    """Four actors, and credit for one: three wait at any time, and so does the learner."""
    slow = {"environment": {"options": {"step_seconds": 1e-3}}, "actors": {"count": 4}}
    assert limited_by(tmp_path, slow, {"staleness": {"max_lag": 0}}) == "credit"


def test_nothing_is_said_before_there_is_an_update() -> None:
    assert what_limits({"actor_time/credit": 1.0}) is None
    assert what_limits({}) is None
