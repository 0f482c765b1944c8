"""What the learners of a world agree on before they start: their configuration, and the checkpoint they go on from."""

from pathlib import Path

import jax
import numpy as np

from tianji_jax.checkpoint import Saved, restore, with_keys, without_keys
from tianji_jax.config import Config, ConfigError, difference, validate
from tianji_jax.parallel import Parallel
from tianji_jax.types import PyTree
from tianji_jax.world import World

OF_ONE_HOST = {"actors.listen", "security.keys", "run.compilation_cache", "actors.environment_threads"}
"""Settings that may be others on another host."""


def check_agreement(config: Config, world: World) -> None:
    """
    Raises:
      ConfigError: the learners' configurations differ, or hold what several learners cannot do.
    """
    if world.alone:
        return
    if config.balance.max_reuse:
        raise ConfigError(
            f"balance.max_reuse={config.balance.max_reuse}: several learners make the same updates in the same order, "
            "and cannot repeat one because a single learner waits for data: set balance.max_reuse=0"
        )
    theirs = validate(world.share(config.model_dump(mode="json")))
    differs = [
        f"{setting} is {ours!r} here and {first!r} on learner 0"
        for setting, first, ours in difference(theirs, config)
        if setting not in OF_ONE_HOST
    ]
    if differs:
        raise ConfigError("all learners need the same configuration: " + "; ".join(differs))


def restore_everywhere(folder: Path, config: Config, like: PyTree, parallel: Parallel, world: World) -> Saved:
    """The newest checkpoint of a run as all learners go on from it; learner 0 reads it and sends it to the others.

    Args:
      folder: of the run.
      config: to go on with.
      like: spec of the learner's state.
      parallel: the devices it is for.
      world: the learners.

    Raises:
      ConfigError: see `restore`.
    """
    every = config.checkpoint.every_learner_steps
    if config.run.deterministic and every is None:
        raise ConfigError(
            "checkpoint.every_learner_steps is null: in lock-step a run can only go on from where its actors began "
            "anew, which they do at the checkpoints that this setting makes"
        )
    multiple_of = every if config.run.deterministic and every is not None else 1
    if world.alone:
        return restore(folder, like, multiple_of=multiple_of)
    local = jax.sharding.SingleDeviceSharding(parallel.local[0])
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=local), like)
    if world.leads:
        saved = restore(folder, one, multiple_of=multiple_of)
        head, state = {"version": saved.version, "progress": saved.progress}, without_keys(saved.state)
    else:
        head, state = None, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), without_keys(one))
    head = world.share(head)
    state = with_keys(parallel.replicate(world.share_arrays(state)), like)
    return Saved(head["version"], state, head["progress"])
