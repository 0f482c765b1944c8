"""Fuses what groups that train together learn: `tianji root`.

The root keeps nothing on disk. The groups hold what it holds, and save it with their checkpoints; one that is started
anew gets its parameters from the first group that finds it.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import zmq

from tianji_jax.blueprint import Blueprint, group_keys, plan
from tianji_jax.config import Config, ConfigError, GroupsConfig, RunConfig
from tianji_jax.group import fusing_codec
from tianji_jax.interrupts import interrupts
from tianji_jax.outer import OuterOptimiser
from tianji_jax.transport import Answer, Authenticator, Progress, RootSocket, Together, Word
from tianji_jax.types import PyTree
from tianji_jax.worker import Workers

logger = logging.getLogger(__name__)

LINE_SECONDS = 10.0
"""Seconds between two lines about the groups."""


@dataclass
class _Group:
    """What the root knows of a group.

    Attributes:
      seed: its `run.seed`.
      heard: when, by the monotonic clock.
      progress: as it said last.
      number: of what it brought last.
      joined: it has taken over the root's parameters, or is about to, and its changes count.
      ended: for good.
    """

    seed: int
    heard: float
    progress: Progress
    number: int = 0
    joined: bool = False
    ended: bool = False


class Root:
    """What the groups have learned together, and who they are; knows no sockets."""

    def __init__(self, groups: GroupsConfig, run: RunConfig) -> None:
        """
        Args:
          groups: the outer optimiser, and how long a silent group counts.
          run: when all have reached the end.
        """
        self._config, self._run = groups, run
        # Tells this root's parameters from those of one before it.
        self._name = secrets.token_hex(8)
        self._groups: dict[str, _Group] = {}
        self._treedef: Any = None
        self._optimisers: tuple[OuterOptimiser, OuterOptimiser]
        self._outer_steps = 0
        self._over = self._solved = False

    @property
    def ended(self) -> bool:
        """Whether a group has ended for good, and none is there any more."""
        return any(group.ended for group in self._groups.values()) and not self._present()

    def together(self, told: str | None = None) -> Together:
        """How all groups stand, for the group `told`."""
        steps = {name: group.progress.environment_steps for name, group in self._groups.items()}
        total, elsewhere = sum(steps.values()), sum(n for name, n in steps.items() if name != told)
        return Together(len(self._present()), total, elsewhere, self._outer_steps, self._over, self._solved)

    def window_return(self) -> float | None:
        """Mean over the groups' own means of their last 100 episodes; None while one has not had so many."""
        means = [group.progress.window_return for group in self._present()]
        known = [mean for mean in means if mean is not None]
        return sum(known) / len(known) if known and len(known) == len(means) else None

    def hear(self, word: Word, now: float) -> Answer:
        """What to say to a group.

        Args:
          word: from it.
          now: by the monotonic clock.
        """
        group = self._groups.setdefault(word.group, _Group(word.seed, now, word.progress))
        group.heard, group.progress = now, word.progress
        if word.kind in ("end", "pause"):
            group.joined, group.ended = False, word.kind == "end"
            return self._answer(word.group, "standing")
        if word.kind == "join":
            twins = [n for n, other in self._groups.items() if other.joined and other.seed == word.seed]
            if twins not in ([], [word.group]):
                why = f"another group has run.seed={word.seed} too, and would act the same: give each its own"
                return self._answer(word.group, "refused", why=why)
            self._join(group, word)
        elif not group.joined or word.root != self._name:
            return self._answer(word.group, "join")
        elif word.kind == "push" and word.number != group.number:
            self._take(group, word)
        self._judge()
        if word.kind == "beat":
            return self._answer(word.group, "standing")
        return self._answer(word.group, "fused", self._values())

    def expire(self, now: float) -> None:
        """Stop counting groups that have been silent for too long."""
        for name, group in self._groups.items():
            if group.joined and now - group.heard > self._config.silence_seconds:
                group.joined = False
                logger.warning("group %s has not been heard of for %.0f s; the others go on", name, now - group.heard)

    def _present(self) -> list[_Group]:
        return [group for group in self._groups.values() if group.joined]

    def _join(self, group: _Group, word: Word) -> None:
        group.joined, group.ended, group.number = True, False, word.number
        if self._treedef is None:
            params, statistics = jax.tree.leaves(word.brought.params), jax.tree.leaves(word.brought.statistics)
            self._treedef = jax.tree.structure(word.brought)
            self._optimisers = (
                OuterOptimiser(params, self._config.learning_rate, self._config.momentum),
                OuterOptimiser(statistics, 1.0, 0.0),
            )

    def _take(self, group: _Group, word: Word) -> None:
        group.number = word.number
        self._outer_steps += 1
        for optimiser, change in zip(self._optimisers, word.brought, strict=True):
            optimiser.step(jax.tree.leaves(change), len(self._present()))

    def _values(self) -> PyTree:
        params, statistics = self._optimisers
        return jax.tree.unflatten(self._treedef, [*params.values, *statistics.values])

    def _judge(self) -> None:
        """Once the end is reached it stays so: groups that leave change the sums."""
        goal, mean = self._run.stop_at_return, self.window_return()
        if not self._over and goal is not None and mean is not None and mean >= goal:
            self._over = self._solved = True
        if self.together().environment_steps >= self._run.environment_steps:
            self._over = True

    def _answer(self, group: str, kind: str, values: PyTree = None, why: str = "") -> Answer:
        return Answer(kind, self.together(group), self._name, values, why)


def serve(config: Config, show: Callable[[str], None] = print) -> Together:
    """Fuse what the groups bring, until they have ended or Ctrl-C.

    Args:
      config: the groups', with `groups.root` set.
      show: takes a line about the groups now and then.

    Returns:
      How the groups stood at the end.

    Raises:
      ConfigError: nobody can listen at `groups.root`, or the agent cannot be fused.
    """
    address = config.groups.root
    if address is None:
        raise ConfigError("groups.root is not set: tcp://HOST:PORT, by which the groups reach this host")
    blueprint = plan(config)
    codec, keys = fusing_codec(blueprint), group_keys(config)
    root, workers = Root(config.groups, config.run), Workers()
    with contextlib.ExitStack() as undo:
        interruption = undo.enter_context(interrupts())
        context = zmq.Context()
        undo.callback(context.destroy, linger=0)
        if keys is not None:
            authenticator = Authenticator(frozenset([keys.public]), context)
            undo.callback(authenticator.close)
            undo.callback(workers.close, 2.0)
            workers.start("authenticator", authenticator.run)
        try:
            socket = RootSocket(address, codec, context, keys)
        except zmq.ZMQError as error:
            raise ConfigError(f"groups.root: cannot listen at {address}: {error.strerror}") from None
        undo.callback(socket.close)
        interruption.stop_by(workers.stop)
        show(_opening(blueprint, sum(np.prod(x.shape, dtype=int) for x in jax.tree.leaves(codec.spec))))
        _fuse_until_the_end(root, socket, workers.stop, show)
        interruption.check("the groups go on by themselves; a new root at the same address goes on with them")
    workers.check()
    return root.together()


def _fuse_until_the_end(root: Root, socket: RootSocket, stop: threading.Event, show: Callable[[str], None]) -> None:
    shown, rejected, before = time.monotonic(), 0, Together(0, 0, 0, 0, False, False)
    while not (stop.is_set() or root.ended):
        rejected += socket.words(lambda word: root.hear(word, time.monotonic()))
        root.expire(time.monotonic())
        now, together = time.monotonic(), root.together()
        if now - shown >= LINE_SECONDS or together.groups != before.groups:
            rate = (together.environment_steps - before.environment_steps) / max(now - shown, 1e-9)
            show(_line(together, root.window_return(), rate, rejected))
            shown, before = now, together


def _opening(blueprint: Blueprint, values: int) -> str:
    config = blueprint.config
    return (
        f"root of groups of {config.agent['name']} on {config.environment.name} at {config.groups.root}: "
        f"{values:,} values, brought every {config.groups.every_learner_steps} updates"
    )


def _line(together: Together, mean: float | None, rate: float, rejected: int) -> str:
    groups, steps, _, outer_steps, *_ = together
    parts = [f"{groups} group{'' if groups == 1 else 's'}", f"{steps:,} environment steps", f"{rate:,.0f}/s"]
    parts += [f"{outer_steps:,} changes fused"]
    parts += [f"return {mean:,.1f}"] if mean is not None else []
    parts += [f"{rejected:,} messages rejected"] if rejected else []
    return ", ".join(parts)
