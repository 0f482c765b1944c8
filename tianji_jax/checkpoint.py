"""Checkpoints of a run: written beside the training, atomically, and read again on whatever devices there are.

A checkpoint holds the learner's whole state (parameters, optimiser, normalisers, random key, policy version) and the
run's progress (counters, the window of returns, the resolved configuration). Orbax writes it to a temporary folder and
renames that, so that a killed process or a full disk leaves the one before.
"""

import contextlib
import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tianji_jax.config import CheckpointConfig, ConfigError
from tianji_jax.types import PyTree
from tianji_jax.worker import POLL_SECONDS

logger = logging.getLogger(__name__)

FOLDER = "checkpoints"
"""Where they lie in the run's folder."""

CONTENTS = "contents"
"""The item of a checkpoint with what the replay held."""

RETURN = "episode_return"
"""What the best checkpoint is best in."""


class CheckpointError(RuntimeError):
    """A checkpoint that had to be written could not be; the ones before are as they were."""


class Snapshot(NamedTuple):
    """A run at one moment.

    Attributes:
      version: the policy version, which numbers the checkpoint.
      state: the learner's, on the devices, in buffers that no update overwrites.
      progress: JSON values by name.
      episode_return: mean of a full window of episodes; None before.
      contents: of the replay, a list of NumPy arrays; None where they are not saved.
    """

    version: int
    state: PyTree
    progress: dict[str, Any]
    episode_return: float | None
    contents: list[np.ndarray] | None = None


class Checkpoints:
    """The checkpoints of one run, for writing.

    Attributes:
      failed: saves that were not written.
      saved: called by `run` after each save.
    """

    def __init__(self, run_folder: Path, config: CheckpointConfig, lock_step: bool) -> None:
        """
        Args:
          run_folder: the run's.
          config: when to save, what to keep.
          lock_step: save by updates only, and wait for each save: where a run is saved decides how it goes on.
        """
        self.folder = run_folder.resolve() / FOLDER
        self.failed = 0
        self._config = config
        self.saved: Callable[[], None] = lambda: None
        self._lock_step = lock_step
        self._saved_at = time.monotonic()
        self._given_version = self._saved_version = -1
        # One waits while one is written: every snapshot is a copy of the state in device memory.
        self._pending: queue.Queue[Snapshot] = queue.Queue(1)
        self._opened: Any = None
        # At the end of a run the last save may meet one that is still being written.
        self._saving = threading.Lock()

    def rewind(self, version: int) -> None:
        """Forget what lies after `version`, from which a run goes on: it could not be read, or will not come again."""
        self._saved_version = self._given_version = version
        for path in self.folder.glob("*") if self.folder.is_dir() else ():
            if path.name.isdigit() and int(path.name) > version:
                shutil.rmtree(path)

    def due(self, version: int) -> bool:
        """Whether the learner, having made `version`, should hand over a snapshot."""
        every, seconds = self._config.every_learner_steps, self._config.every_seconds
        if version == 0 or version == self._given_version:
            return False
        if every is not None and version % every == 0:
            return True
        if self._lock_step or seconds is None or self._pending.full():
            return False
        return time.monotonic() - self._saved_at >= seconds

    def put(self, snapshot: Snapshot, stop: threading.Event) -> None:
        """Hand over a snapshot to be saved by `run`; waits while another one waits."""
        self._saved_at, self._given_version = time.monotonic(), snapshot.version
        while not stop.is_set():
            try:
                self._pending.put(snapshot, timeout=POLL_SECONDS)
            except queue.Full:
                continue
            return

    def run(self, stop: threading.Event) -> None:
        """Save what is handed over until `stop` is set, and then what still waits.

        A save that fails is told and counted, and training goes on.
        """
        # The first use takes longer than a save: it is over before there is something to save, which tells what fails.
        with contextlib.suppress(Exception), self._saving:
            self._manager()
        while not (stop.is_set() and self._pending.empty()):
            try:
                snapshot = self._pending.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            try:
                self.save(snapshot)
            except CheckpointError as error:
                logger.warning("%s", error)
            else:
                self.saved()

    def save(self, snapshot: Snapshot) -> None:
        """Save now, unless that version is saved already.

        Raises:
          CheckpointError: it could not be written.
        """
        with self._saving:
            if snapshot.version != self._saved_version:
                self._save(snapshot)

    def _save(self, snapshot: Snapshot) -> None:
        import orbax.checkpoint as ocp

        try:
            metrics = None if snapshot.episode_return is None else {RETURN: snapshot.episode_return}
            progress = {**snapshot.progress, RETURN: snapshot.episode_return, "arrays": _describe(snapshot.state)}
            if snapshot.contents is not None:
                progress[CONTENTS] = _describe(snapshot.contents)
            # On the host: Orbax refuses arrays on the devices of one process where there are several.
            items = {
                "state": ocp.args.StandardSave(jax.device_get(without_keys(snapshot.state))),
                "progress": ocp.args.JsonSave(progress),
            }
            if snapshot.contents is not None:
                items[CONTENTS] = ocp.args.StandardSave(snapshot.contents)
            self._manager().save(snapshot.version, args=ocp.args.Composite(**items), metrics=metrics, force=True)
        # Orbax and TensorStore raise what they like; whatever it is, the training must not end for it.
        except Exception as error:
            self.failed += 1
            self._opened = None
            raise CheckpointError(f"no checkpoint of version {snapshot.version} in {self.folder}: {error}") from error
        self._saved_version = snapshot.version

    def close(self) -> None:
        """Let go of the folder."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _manager(self) -> Any:
        import orbax.checkpoint as ocp
        from orbax.checkpoint import checkpoint_managers as policies

        if self._opened is None:
            kept = [policies.LatestN(self._config.keep)]
            if self._config.keep_best:
                best = policies.BestN(
                    get_metric_fn=lambda metrics: metrics[RETURN], n=1, keep_checkpoints_without_metrics=False
                )
                kept.append(best)
            options = ocp.CheckpointManagerOptions(
                # Saving is on a thread of its own already.
                enable_async_checkpointing=False,
                preservation_policy=policies.AnyPreservationPolicy(kept),
                cleanup_tmp_directories=True,
                create=False,
                multiprocessing_options=_this_process(),
            )
            self.folder.mkdir(exist_ok=True)
            self._opened = ocp.CheckpointManager(self.folder, options=options)
        return self._opened


class Saved(NamedTuple):
    """A checkpoint that has been read.

    Attributes:
      version: the policy version.
      state: as `like` of `restore` says.
      progress: as in `Snapshot`.
    """

    version: int
    state: PyTree
    progress: dict[str, Any]


def restore(run_folder: Path, like: PyTree, *, best: bool = False, multiple_of: int = 1) -> Saved:
    """Read the newest checkpoint of a run, or the best; one that is damaged is told and passed over.

    Args:
      run_folder: the run's.
      like: the state's shapes, dtypes and shardings (`jax.ShapeDtypeStruct` leaves), for the devices of this process.
      best: the one with the highest mean return of 100 episodes.
      multiple_of: only versions that this divides.

    Raises:
      ConfigError: there is none, or it does not fit `like`; the message names the arrays that differ.
    """
    import orbax.checkpoint as ocp

    folder = run_folder.resolve() / FOLDER
    if not folder.is_dir() or not any(path.name.isdigit() for path in folder.iterdir()):
        raise ConfigError(
            f"{run_folder} holds no checkpoint: it ended before the first was due (checkpoint.every_seconds, "
            "checkpoint.every_learner_steps); start it anew"
        )
    options = ocp.CheckpointManagerOptions(create=False, multiprocessing_options=_this_process())
    with ocp.CheckpointManager(folder, options=options) as manager:
        versions = sorted((v for v in manager.all_steps() if v % multiple_of == 0), reverse=True)
        found: dict[int, dict[str, Any]] = {}
        for version in versions:
            try:
                found[version] = dict(
                    manager.restore(version, args=ocp.args.Composite(progress=ocp.args.JsonRestore())).progress
                )
            except Exception as error:
                logger.warning("passed over checkpoint %d in %s, which cannot be read: %s", version, folder, error)
        if best:
            found = {v: progress for v, progress in found.items() if progress[RETURN] is not None}
        order = sorted(found, key=lambda v: (found[v][RETURN], v) if best else v, reverse=True)
        for version in order:
            _check(found[version]["arrays"], _describe(like), folder / str(version))
            try:
                args = ocp.args.Composite(state=ocp.args.StandardRestore(without_keys(like)))
                state = manager.restore(version, args=args).state
            except Exception as error:
                logger.warning("passed over checkpoint %d in %s, which cannot be read: %s", version, folder, error)
                continue
            return Saved(version, with_keys(state, like), found[version])
    which = "with a mean return of 100 episodes " if best else ""
    multiple = f"of a version that {multiple_of} divides " if multiple_of > 1 else ""
    raise ConfigError(f"{run_folder} holds no checkpoint {which}{multiple}".rstrip())


def restore_contents(run_folder: Path, saved: Saved, like: list[Any]) -> list[Any] | None:
    """What was saved of the replay with a checkpoint; None, and said so, where nothing was or its size differs.

    Args:
      run_folder: of the run.
      saved: the checkpoint; its state is not needed.
      like: shapes, dtypes and shardings of arrays for devices; NumPy arrays for such.
    """
    import orbax.checkpoint as ocp

    theirs = saved.progress.get(CONTENTS)
    if theirs != _describe(like):
        why = "there was none saved" if theirs is None else "the one saved has another size or other devices"
        logger.warning("the replay begins empty: %s with checkpoint %d of %s", why, saved.version, run_folder)
        return None
    options = ocp.CheckpointManagerOptions(create=False, multiprocessing_options=_this_process())
    with ocp.CheckpointManager(run_folder.resolve() / FOLDER, options=options) as manager:
        args = ocp.args.Composite(**{CONTENTS: ocp.args.StandardRestore(like)})
        try:
            return list(manager.restore(saved.version, args=args)[CONTENTS])
        except Exception as error:
            logger.warning(
                "the replay begins empty: checkpoint %d of %s, its part: %s", saved.version, run_folder, error
            )
            return None


def _this_process() -> Any:
    """Orbax's options where one process of several reads or writes: nothing waits for the others.

    All hold the same state, so that the others have nothing to add.
    """
    import orbax.checkpoint as ocp

    rank = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=rank, active_processes={rank}, barrier_sync_key_prefix=f"learner-{rank}"
    )


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def without_keys(state: PyTree) -> PyTree:
    """Random keys as the numbers they are made of, which is what can be stored."""

    def plain(x: Any) -> Any:
        if not _is_key(x):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            data = jax.eval_shape(jax.random.key_data, x)
            return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)
        return jax.random.key_data(x)

    return jax.tree.map(plain, state)


def with_keys(state: PyTree, like: PyTree) -> PyTree:
    """`without_keys` undone, where `like` has keys."""

    def key(x: Any, like: Any) -> Any:
        return jax.random.wrap_key_data(x) if _is_key(like) else x

    return jax.tree.map(key, state, like)


def _describe(state: PyTree) -> dict[str, str]:
    """Dtype and shape of every array by its path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _check(theirs: dict[str, str], ours: dict[str, str], where: Path) -> None:
    paths = [path for path in {**theirs, **ours} if theirs.get(path) != ours.get(path)]
    if not paths:
        return
    lines = [f"  {p}: {theirs.get(p, 'nothing')} in the checkpoint, {ours.get(p, 'nothing')} here" for p in paths[:8]]
    if len(paths) > len(lines):
        lines.append(f"  and {len(paths) - len(lines)} more")
    raise ConfigError("\n".join([f"{where} does not fit the agent or environment as they are configured now:", *lines]))
