"""Train an agent."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from tianji_jax.agreement import check_agreement
from tianji_jax.blueprint import plan
from tianji_jax.config import Config, validate
from tianji_jax.interrupts import interrupts
from tianji_jax.parallel import Parallel, learner_devices, use_compilation_cache
from tianji_jax.run import Run
from tianji_jax.types import PyTree
from tianji_jax.world import current_world


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
      episode_return: mean of the last 100 finished episodes; None when none finished.
      environment_steps: taken by the environments.
      learner_steps: updates.
      seconds: from the call to the end.
      solved: whether `run.stop_at_return` was reached.
      path: the run's folder.
      train_state: the agent's training state after the last update, NumPy arrays; `agent.actor_params` takes it.
    """

    episode_return: float | None
    environment_steps: int
    learner_steps: int
    seconds: float
    solved: bool
    path: Path
    train_state: PyTree = field(repr=False)


def train(
    config: Config | Mapping[str, Any], *, show: bool = True, resume: str | Path | None = None, profile: int = 0
) -> Result:
    """Train until `run.environment_steps` or `run.stop_at_return`.

    Args:
      config: from `tianji_jax.load`, or the same as nested dicts.
      show: print progress to standard output.
      resume: folder of a run to go on with, from its newest checkpoint; `config` may differ from that run's in all that
        leaves the shapes of its arrays alone.
      profile: updates to profile, after the first few; what is found lies in the run's folder.

    Raises:
      ConfigError: the configuration cannot run; nothing has been started.
      WorkerError: an actor or the learner failed, with its exception as the cause; everything has been taken down.
      CheckpointError: the run ended, and could not be saved.
      KeyboardInterrupt: Ctrl-C, after the run has been saved and everything taken down.
      Preempted: SIGTERM, likewise; a `SystemExit` with code 75.
    """
    began = time.monotonic()
    if not isinstance(config, Config):
        config = validate(dict(config))
    with interrupts() as interruption:
        use_compilation_cache(config.run.compilation_cache)
        devices, world = learner_devices(config.learner), current_world()
        blueprint, parallel = plan(config, world), Parallel(devices, config.learner.parallel)
        check_agreement(config, world)
        run = Run(blueprint, parallel, None if resume is None else Path(resume))
        run.profile_updates = profile
        interruption.stop_by(run.leave)
        report = run.execute(show, interruption)
    return Result(
        episode_return=report.get("episode_return"),
        environment_steps=report["environment_steps"],
        learner_steps=report["learner_steps"],
        seconds=time.monotonic() - began,
        solved=run.solved(),
        path=run.path,
        train_state=jax.device_get(run.learner.state.train_state),
    )
