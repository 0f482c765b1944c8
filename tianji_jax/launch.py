"""Put a run together, watch over it, and take it down again."""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import zmq

from tianji_jax.actor_process import ActorProcesses
from tianji_jax.balance import Balance
from tianji_jax.blueprint import Addresses, Blueprint, connect, make_actor, plan
from tianji_jax.config import Config, ConfigError, to_yaml, validate
from tianji_jax.console import display
from tianji_jax.device_queue import BatchAssembler, DeviceQueue
from tianji_jax.interrupts import interrupts
from tianji_jax.learner import Learner, Publisher, first_params, init_state, update_step
from tianji_jax.lock_step import LockStepBalance
from tianji_jax.metrics import Meter, MetricsFile, Report
from tianji_jax.parallel import Parallel, actor_device, learner_devices, use_compilation_cache
from tianji_jax.receiver import Batcher, Pipeline, Receiver
from tianji_jax.staleness import StalenessFilter
from tianji_jax.transport import ParameterServer, TrajectoryServer, local_address
from tianji_jax.types import PyTree
from tianji_jax.worker import Workers

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 4.0
"""How long workers get to end by themselves."""


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
    train_state: PyTree


def train(config: Config | Mapping[str, Any], *, show: bool = True) -> Result:
    """Train until `run.environment_steps` or `run.stop_at_return`.

    Args:
      config: from `tianji_jax.load`, or the same as nested dicts.
      show: print progress to standard output.

    Raises:
      ConfigError: the configuration cannot run; nothing has been started.
      WorkerError: an actor or the learner failed, with its exception as the cause; everything has been taken down.
      KeyboardInterrupt: after everything has been taken down.
    """
    began = time.monotonic()
    if not isinstance(config, Config):
        config = validate(dict(config))
    with interrupts() as interruption:
        use_compilation_cache(config.run.compilation_cache)
        devices = learner_devices(config.learner)
        run = Run(plan(config), Parallel(devices, config.learner.parallel))
        interruption.stop_by(run.workers.stop)
        report = run.execute(show)
        interruption.check()
    return Result(
        episode_return=report.get("episode_return"),
        environment_steps=report["environment_steps"],
        learner_steps=report["learner_steps"],
        seconds=time.monotonic() - began,
        solved=run.solved(),
        path=run.path,
        train_state=jax.device_get(run.learner.state.train_state),
    )


class Run:
    """One training run: its queues, its threads, its folder."""

    def __init__(self, blueprint: Blueprint, parallel: Parallel) -> None:
        """Nothing runs yet and nothing is written.

        Raises:
          ConfigError: the batch cannot be divided among the devices, or the agent cannot learn from one of that shape.
        """
        config = blueprint.config
        self._blueprint, self._config, self._parallel = blueprint, config, parallel
        trajectories = config.learner.trajectories_per_update
        self._init_state = functools.partial(init_state, blueprint.agent, config.run.seed)
        try:
            assembler = BatchAssembler(blueprint.trajectory, trajectories, parallel.num_devices)
            shard_spec = assembler.shard_spec(blueprint.trajectory)
            step = update_step(blueprint.agent, config.staleness)
            self._lowered = parallel.lower(step, jax.eval_shape(self._init_state), shard_spec)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._devices = DeviceQueue(parallel, assembler, shard_spec, config.learner.queue_capacity)
        self._meter = Meter(blueprint.env_spec.frame_skip)
        max_lag, actors = config.staleness.max_lag, config.actors.count
        lock_step = config.run.deterministic
        self._pipeline = Pipeline(
            StalenessFilter(config.staleness.fresh_lag, max_lag),
            LockStepBalance(max_lag, trajectories, actors) if lock_step else Balance(max_lag, trajectories),
            self._meter,
        )
        self.workers = Workers()
        self._context: zmq.Context
        self._resources = contextlib.ExitStack()
        self.path = Path()
        self.learner: Learner

    def execute(self, show: bool) -> Report:
        """Start everything, report until the end, take everything down; returns the last report."""
        self.path = make_run_folder(self._config)
        (self.path / "config.yaml").write_text(to_yaml(self._config))
        metrics_file = MetricsFile(self.path / "metrics.jsonl")
        workers = self.workers
        self._context = zmq.Context()
        self._resources.callback(self._context.destroy, linger=0)
        try:
            self._start()
            with display(self._config, *self._headings(), show) as shown:
                while not workers.stop.wait(self._config.run.report_every_seconds):
                    report = self._report()
                    metrics_file.write(report)
                    shown.show(report)
                workers.check()
                # What is still on its way to the meter arrives while the workers end.
                self._resources.close()
                report = self._report()
                metrics_file.write(report)
                shown.show(report, final=True)
        finally:
            self._resources.close()
            metrics_file.close()
        workers.check()
        return report

    def solved(self) -> bool:
        """Whether the return asked for has been reached."""
        goal = self._config.run.stop_at_return
        return goal is not None and self._meter.reached(goal)

    def _finished(self) -> bool:
        return self._meter.environment_steps >= self._config.run.environment_steps or self.solved()

    def _start(self) -> None:
        config, blueprint, workers = self._config, self._blueprint, self.workers
        kind = "inproc" if config.actors.placement == "thread" else "ipc"
        lock_step = config.run.deterministic
        address = self._resources.enter_context(local_address(kind))
        trajectories = TrajectoryServer(address, blueprint.trajectory_codec(), self._context)
        parameters = ParameterServer(
            self._resources.enter_context(local_address(kind)),
            blueprint.parameter_codec(),
            self._context,
            # In lock-step an actor may still need any version back to the oldest that may be learned from.
            keep=config.staleness.max_lag + 1 if lock_step else 1,
        )
        # In reverse at the end: the threads first, then their sockets, then what those lay on.
        self._resources.callback(trajectories.close)
        self._resources.callback(parameters.close)
        self._resources.callback(self._stop_workers)
        receiver = Receiver(trajectories, self._pipeline, config.actors.count if lock_step else None)
        batcher = Batcher(receiver.ready, self._devices, self._pipeline, config.learner.trajectories_per_update)
        publisher = Publisher(parameters, self._pipeline, config.learner.max_bad_updates)
        workers.start("receiver", receiver.run)
        workers.start("parameter server", parameters.serve)
        workers.start("batcher", batcher.run)
        workers.start("publisher", publisher.run)
        self._start_actors(Addresses(trajectories.endpoint, parameters.endpoint))
        workers.start("learner", functools.partial(self._learn, publisher))

    def _start_actors(self, addresses: Addresses) -> None:
        config = self._config
        if config.actors.placement == "process":
            processes = ActorProcesses(self.path, config.actors.count, addresses)
            self.workers.start("actor processes", processes.run)
            return

        def act(actor_id: int, stop: threading.Event) -> None:
            device = actor_device(config.actors.device, self._parallel.devices, actor_id)
            actor = make_actor(self._blueprint, actor_id, device)
            actor.run(*connect(self._blueprint, actor_id, addresses, self._context), stop)

        for actor_id in range(config.actors.count):
            self.workers.start(f"actor {actor_id}", functools.partial(act, actor_id))

    def _learn(self, publisher: Publisher, stop: threading.Event) -> None:
        state = self._parallel.init(self._init_state)
        publisher.publish(0, first_params(self._blueprint.agent, state))
        step = self._lowered.compile()
        self.learner = Learner(state, step, self._devices, self._pipeline, self._config.balance, publisher)
        self.learner.run(stop, self._finished)
        stop.set()

    def _report(self) -> Report:
        counts = self._pipeline.ledger.counts
        return {
            **self._meter.report(),
            "policy_version": self._pipeline.version,
            "trajectories_received": counts.received,
            "trajectories_consumed": counts.consumed,
            "trajectories_dropped": counts.dropped,
            "trajectories_rejected": counts.rejected,
            "trajectories_queued": counts.queued,
            "device_queue_fill": len(self._devices) / self._devices.capacity,
        }

    def _headings(self) -> tuple[str, str]:
        actors, parallel = self._config.actors, self._parallel
        title = f"{self._config.agent['name']} on {self._config.environment.name}"
        parts = [
            str(self.path),
            f"{actors.count} actor {actors.placement}{'s' * (actors.count > 1)} x {actors.environments}",
            f"{parallel.num_devices} {parallel.devices[0].platform} device{'s' * (parallel.num_devices > 1)}",
            f"{self._devices.nbytes / 2**20:.1f} MiB a batch",
        ]
        return title, ", ".join(parts)

    def _stop_workers(self) -> None:
        left = self.workers.close(CLOSE_SECONDS)
        if left:
            logger.warning("still running after %g s: %s", CLOSE_SECONDS, ", ".join(left))
            # They may still be in their sockets; the process's end closes those.
            self._resources.pop_all()


def make_run_folder(config: Config) -> Path:
    """Create the run's folder; runs that start at the same moment get different ones.

    Raises:
      ConfigError: a run of that name exists, or the folder cannot be made.
    """
    run = config.run
    name = run.name or f"{config.environment.name.partition(':')[2]}_{config.agent['name']}".replace("/", "-").replace(
        ":", "-"
    )
    try:
        run.directory.mkdir(parents=True, exist_ok=True)
        for number in range(1, 100_000):
            path = run.directory / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir()
            except FileExistsError:
                if run.name:
                    raise ConfigError(
                        f"run.name: {path} exists already; choose another name, or leave run.name out to get a number"
                    ) from None
                continue
            return path
    except OSError as error:
        raise ConfigError(f"run.directory: cannot create a folder in {run.directory}: {error.strerror}") from None
    raise ConfigError(f"run.directory: {run.directory} holds too many runs called {name}")
