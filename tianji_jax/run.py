"""One training run: its queues, its threads, its folder; put together, watched over, taken down."""

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
import zmq

from tianji_jax.actor_process import ActorProcesses
from tianji_jax.agreement import restore_everywhere
from tianji_jax.attendance import Attendance
from tianji_jax.balance import Balance
from tianji_jax.ballot import Ballot, Outcome
from tianji_jax.blueprint import Addresses, Blueprint, Servers, connect, listen, make_actor, schedule, server_keys
from tianji_jax.checkpoint import Checkpoints, Snapshot
from tianji_jax.config import ConfigError, to_yaml
from tianji_jax.console import display, heading
from tianji_jax.curves import PICTURE, draw_run
from tianji_jax.device_queue import BatchAssembler, DeviceQueue
from tianji_jax.group import Membership
from tianji_jax.interrupts import Interrupts, Preempted
from tianji_jax.learner import Learner, Publisher, first_params, init_state
from tianji_jax.learning import make_learning
from tianji_jax.limits import what_limits
from tianji_jax.lock_step import LockStepBalance, Order
from tianji_jax.metrics import Meter, Report
from tianji_jax.parallel import Parallel, actor_device
from tianji_jax.profile import Profile
from tianji_jax.receiver import Batcher, Pipeline, Receiver
from tianji_jax.run_folder import CONFIG, held, make_run_folder, rewind_metrics
from tianji_jax.sinks import Sinks, check_installed, open_sinks
from tianji_jax.staleness import Counts, Ledger
from tianji_jax.transport import local_address
from tianji_jax.usage import CpuUsage
from tianji_jax.worker import POLL_SECONDS, Workers

if TYPE_CHECKING:
    from tianji_jax.replay_learner import ReplayLearner

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 30.0
"""How long a learner that was told to stop waits for the others to stop after the same update."""

CLOSE_SECONDS = 4.0
"""How long workers get to end by themselves."""


class Run:
    """One training run: its queues, its threads, its folder."""

    def __init__(self, blueprint: Blueprint, parallel: Parallel, resume: Path | None = None) -> None:
        """Nothing runs yet and nothing is written.

        Raises:
          ConfigError: the batch cannot be divided among the devices, the agent cannot learn from one of that shape, or
            the run cannot be resumed.
        """
        config, world = blueprint.config, blueprint.world
        self._blueprint, self._config, self._parallel, self._world = blueprint, config, parallel, world
        self._schedule, self._resume = schedule(config), resume
        trajectories, max_lag = config.learner.trajectories_per_update, config.staleness.max_lag
        self._init_state, self._seed = functools.partial(init_state, blueprint.agent), np.uint32(config.run.seed)
        state_spec = parallel.spec(jax.eval_shape(self._init_state, self._seed))
        try:
            assembler = BatchAssembler(blueprint.trajectory, trajectories, len(parallel.local))
            shard_spec = assembler.shard_spec(blueprint.trajectory)
            self._learning = make_learning(blueprint, parallel, state_spec, shard_spec)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        check_installed(config.metrics)
        self._keys = server_keys(config)
        self._saved = None if resume is None else restore_everywhere(resume, config, state_spec, parallel, world)
        progress = {} if self._saved is None else self._saved.progress
        version = 0 if self._saved is None else self._saved.version
        if resume is not None and self._saved is not None:
            self._learning.resume(resume, self._saved)
        self._copy = parallel.copier(state_spec)
        self._meter = Meter(blueprint.env_spec.frame_skip, progress.get("meter"))
        self._pipeline = Pipeline(
            self._learning.staleness_filter(),
            Balance(max_lag, trajectories) if self._schedule is None else LockStepBalance(self._schedule, version),
            self._meter,
            Ledger(Counts(**progress.get("ledger", {}))),
            version,
        )
        stopwatch = self._pipeline.stopwatch("batcher")
        self._devices = DeviceQueue(parallel, assembler, shard_spec, config.learner.queue_capacity, stopwatch)
        self._attendance = Attendance(config.actors, lock_step=self._schedule is not None)
        self._attendance.restarts = progress.get("restarts", 0)
        self._attendance.trajectories_lost = progress.get("trajectories_lost", 0)
        self._stopwatch, self._cpu = self._pipeline.stopwatch("dispatcher"), CpuUsage()
        self._group: Membership | None = None
        if config.groups.root is not None:
            self._group = Membership(blueprint, parallel, state_spec, self._meter, progress.get("group"))
        self.workers = Workers()
        self._ballot = None if world.alone else Ballot(world.size, self._meter, version)
        self.leave = self.workers.stop if self._ballot is None else self._ballot.leave
        self.profile_updates = 0
        self._context: zmq.Context
        self._resources = contextlib.ExitStack()
        self.path = Path()
        self.learner: Learner | ReplayLearner
        self._outcome: Outcome | None = None
        self._leaving: tuple[int, float] | None = None  # the version when last looked at, and since when
        self._compiled, self._learned = threading.Event(), False

    def execute(self, show: bool, interruption: Interrupts) -> Report:
        """Start everything, report until the end, take everything down, save; returns the last report."""
        config = self._config
        with contextlib.ExitStack() as folder:
            folder.callback(self._resources.close)
            # An address that is taken is found before anything is written.
            self._servers, self._local = self._listen()
            self.path = self._make_folder()
            folder.enter_context(held(self.path))
            rewind_metrics(self.path, self._pipeline.version, self._meter.environment_steps)
            (self.path / CONFIG).write_text(to_yaml(config))
            if self._world.leads:
                folder.callback(self._draw)  # when the sinks have written the last report
            sinks = open_sinks(self.path, config, self._meter.environment_steps) if self._world.leads else Sinks({})
            self._sinks = folder.enter_context(sinks)
            self._checkpoints = Checkpoints(self.path, config.checkpoint, self._schedule is not None)
            folder.callback(self._checkpoints.close)
            self._checkpoints.saved = self._draw
            self._profile = Profile(self.path, self.profile_updates, self._pipeline.timeline)
            if self._resume is not None:
                self._checkpoints.rewind(self._pipeline.version)
            report = self._report_until_the_end(show and self._world.leads)
            self._save_last(interruption)
        self.workers.check()
        interruption.check(self._advice())
        if self._outcome is not None and self._outcome.leave:
            raise Preempted(f"another learner was stopped; {self._advice()}")
        return report

    def _make_folder(self) -> Path:
        """The run's folder for the learner that leads, one in it for each of the others."""
        path = self._resume
        if path is None:
            path = Path(self._world.share(str(make_run_folder(self._config)) if self._world.leads else None))
        if not self._world.leads:
            path /= f"learner-{self._world.rank}"
            path.mkdir(parents=True, exist_ok=True)
        return path

    def _report_until_the_end(self, show: bool) -> Report:
        try:
            self._start()
            with display(self._config, *self._headings(), show) as shown:
                while not self.workers.stop.wait(self._config.run.report_every_seconds):
                    self._leave_in_time()
                    report = self._report()
                    self._sinks.put(report)
                    shown.show(report)
                # What is still on its way to the meter arrives while the workers end.
                self._resources.close()
                report = self._report()
                self._sinks.put(report)
                shown.show(report, final=True)
        finally:
            self._resources.close()
        return report

    def _leave_in_time(self) -> None:
        """Stop alone where the other learners do not come to agree. While XLA compiles, there is no update either."""
        version, now = self._pipeline.version, time.monotonic()
        if not self.leave.is_set() or not self._compiled.is_set():
            self._leaving = None
        elif self._leaving is None or self._leaving[0] != version:
            self._leaving = version, now
        elif now - self._leaving[1] > LEAVE_SECONDS:
            error = TimeoutError(f"the other learners have made no update for {LEAVE_SECONDS:g} s after the signal")
            self.workers.fail("learner", error)

    def _save_last(self, interruption: Interrupts) -> None:
        """Save a learner that ended well, whatever else may have failed."""
        bad = not self._learned or int(self.learner.state.bad_updates) >= self._config.learner.max_bad_updates
        if not self._world.leads or bad:
            return
        # In lock-step a run can only go on from where all actors began anew.
        if self._schedule is None or not interruption.received:
            self._checkpoints.save(self._snapshot())

    def _advice(self) -> str:
        """What to say of a run that was stopped."""
        every = 1 if self._schedule is None else self._schedule.begin_every
        if not every or self._pipeline.version < every:
            return "nothing was saved"
        if self._world.alone:
            return f"go on with: tianji train --resume {self.path}"
        leader = self.path if self._world.leads else self.path.parent
        return f"go on with: tianji learner --resume {leader}"

    def _snapshot(self) -> Snapshot:
        """The run as it is; on the learner's thread, or when that has ended."""
        version, meter = self._pipeline.version, self._meter.state()
        # The meter hears of an update only when its metrics have been fetched.
        meter["counts"]["learner_steps"] = version
        progress = {
            "meter": meter,
            "ledger": dataclasses.asdict(self._pipeline.ledger.counts),
            "restarts": self._attendance.restarts,
            "trajectories_lost": self._attendance.trajectories_lost,
            "config": self._config.model_dump(mode="json"),
        }
        if self._group is not None:
            progress["group"] = dict(self._group.state)
        state, contents = self._copy(self.learner.state), self._learning.contents()
        return Snapshot(version, state, progress, self._meter.window_return, contents)

    def _draw(self) -> None:
        try:
            draw_run(self.path)
        except Exception as error:  # a picture less; the training must not end for it
            logger.warning("%s was not drawn: %s: %s", self.path / PICTURE, type(error).__name__, error)

    def solved(self) -> bool:
        """Whether the return asked for has been reached."""
        if self._group is not None:
            return self._group.solved
        goal = self._config.run.stop_at_return
        if goal is None or self._ballot is None:
            return goal is not None and self._meter.reached(goal)
        mean = None if self._outcome is None else self._outcome.window_return
        return mean is not None and mean >= goal

    def _between_updates(self) -> bool:
        """On the learner's thread before each update: hands over a checkpoint that is due; whether the run is over."""
        self._profile.between_updates(self._pipeline.version)
        if self._world.leads and self._checkpoints.due(self._pipeline.version):
            with self._stopwatch("checkpoints"):
                self._checkpoints.put(self._snapshot(), self.workers.stop)
        if self._group is not None:
            self.learner.state = self._group.between_updates(self.learner.state, self._pipeline.version)
            if self._group.over:
                return True
        if self._ballot is None:
            return self._meter.environment_steps >= self._config.run.environment_steps or self.solved()
        self._outcome = outcome = self._ballot.outcome(self._pipeline.version, self.workers.stop)
        if outcome is None:
            return False
        return outcome.leave or outcome.environment_steps >= self._config.run.environment_steps or self.solved()

    def _listen(self) -> tuple[Servers, Addresses]:
        """The servers, and the addresses for this learner's own actors."""
        config = self._config
        self._context = zmq.Context()
        self._resources.callback(self._context.destroy, linger=0)
        kind = "inproc" if config.actors.placement == "thread" else "ipc"
        try:
            local = Addresses(*(self._resources.enter_context(local_address(kind)) for _ in range(2)))
        except ValueError as error:
            raise ConfigError(f"actors.placement={config.actors.placement}: {error}") from None
        # In lock-step an actor may still need any version back to the oldest that may be learned from.
        keep = 1 if self._schedule is None else config.staleness.max_lag + 1
        servers = listen(self._blueprint, self._keys, local, self._context, keep)
        # In reverse at the end: the threads first, then their sockets, then what those lay on.
        self._resources.callback(servers.close)
        self._resources.callback(self._stop_workers)
        return servers, local

    def _start(self) -> None:
        config, workers, servers = self._config, self.workers, self._servers
        trajectories, parameters = servers.trajectories, servers.parameters
        order = None if self._schedule is None else Order(self._schedule, self._pipeline.version)
        receiver = Receiver(trajectories, self._pipeline, self._attendance, order)
        batcher = Batcher(receiver.ready, self._devices, self._pipeline, config.learner.trajectories_per_update)
        publisher = Publisher(parameters, self._pipeline, config.learner.max_bad_updates)
        if self._ballot is not None:
            publisher.count = self._ballot.count
        if servers.authenticator is not None:
            workers.start("authenticator", servers.authenticator.run)
        workers.start("receiver", receiver.run)
        workers.start("parameter server", parameters.serve)
        workers.start("batcher", batcher.run)
        workers.start("publisher", publisher.run)
        workers.start("checkpoints", self._checkpoints.run)
        if self._group is not None and self._group.courier is not None:
            workers.start("group", functools.partial(self._group.courier.run, self._context))
        self._start_actors(self._local)
        # XLA compiles without Python's lock: meanwhile the state is made, and the actors get ready.
        workers.start("compiler", self._compile)
        workers.start("learner", functools.partial(self._learn, publisher))

    def _start_actors(self, addresses: Addresses) -> None:
        config = self._config
        if config.actors.placement == "process":
            processes = ActorProcesses(
                self.path, self._blueprint, addresses, self._attendance, lambda: self._pipeline.version
            )
            self.workers.start("actor processes", processes.run)
            return

        def act(actor_id: int, stop: threading.Event) -> None:
            device = actor_device(config.actors.device, self._parallel.local, actor_id)
            actor = make_actor(self._blueprint, actor_id, device, start=self._pipeline.version)
            actor.run(*connect(self._blueprint, actor_id, addresses, self._context), stop)

        for actor_id in range(config.actors.count):
            self.workers.start(f"actor {actor_id}", functools.partial(act, actor_id))

    def _compile(self, stop: threading.Event) -> None:
        self._learning.compile()
        self._compiled.set()

    def _learn(self, publisher: Publisher, stop: threading.Event) -> None:
        saved, self._saved = self._saved, None
        state = self._parallel.init(self._init_state, self._seed) if saved is None else saved.state
        publisher.publish(self._pipeline.version, first_params(self._blueprint.agent, state))
        while not self._compiled.wait(POLL_SECONDS):
            if stop.is_set():
                return
        learner = self._learning.learner
        self.learner = learner(state, self._devices, self._pipeline, publisher, self._ballot)
        self.learner.run(stop, self._between_updates)
        self._profile.close()
        self._learned = True
        if self._group is not None and self._group.courier is not None:
            left = self._outcome is not None and self._outcome.leave
            self._group.courier.ended = not (stop.is_set() or left)
        stop.set()

    def _report(self) -> Report:
        counts, rejections = self._pipeline.ledger.counts, self._pipeline.ledger.rejections
        refusals = self._servers.parameters.rejections
        used, busy = self._cpu.cores()
        report = {
            **self._meter.report(),
            "policy_version": self._pipeline.version,
            "checkpoints_failed": self._checkpoints.failed,
            "reports_lost": self._sinks.lost,
            "actors_connected": self._attendance.connected,
            "actors_hung": self._attendance.hung,
            "actors_restarted": self._attendance.restarts,
            "trajectories_received": counts.received,
            "trajectories_consumed": counts.consumed,
            "trajectories_dropped": counts.dropped,
            "trajectories_rejected": counts.rejected,
            "trajectories_queued": counts.queued,
            **{f"rejected/{reason}": number for reason, number in rejections.items()},
            **{f"parameters_rejected/{reason}": number for reason, number in refusals.items()},
            "trajectories_lost": self._attendance.trajectories_lost,
            "device_queue_fill": len(self._devices) / self._devices.capacity,
            "cores_used": used,
            "cores_busy": busy,
            **self._learning.report(),
            **({} if self._group is None else self._group.report()),
        }
        return report | {"limited_by": stage} if (stage := what_limits(report)) else report

    def _headings(self) -> tuple[str, str]:
        actors, parallel = self._config.actors, self._parallel
        parts = [
            str(self.path),
            f"{_plural(actors.count, f'actor {actors.placement}')} x {actors.environments}",
            _plural(parallel.num_devices, f"{parallel.devices[0].platform} device"),
            f"{self._devices.nbytes / 2**20:.1f} MiB a batch",
            *self._learning.headings(),
        ]
        if actors.listen is not None:
            parts.insert(2, f"more at {actors.listen}")
        return heading(self._config), ", ".join(parts)

    def _stop_workers(self) -> None:
        left = self.workers.close(CLOSE_SECONDS)
        if left:
            logger.warning("still running after %g s: %s", CLOSE_SECONDS, ", ".join(left))
            # They may still be in their sockets; the process's end closes those.
            self._resources.pop_all()


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"
