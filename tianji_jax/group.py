"""A run that trains together with others: between updates it brings its root what it has learned, and takes over what
all have learned together.

Nothing waits. What was brought is under way while the updates go on; when the answer is there, the run takes over the
root's parameters and keeps what it has learned meanwhile: `own + (root's - own as they were brought)`. Without a root
it trains on by itself.
"""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import zmq

from tianji_jax.agent import CanBeFused, Fused
from tianji_jax.blueprint import Blueprint, group_keys
from tianji_jax.config import ConfigError, flatten
from tianji_jax.learner import LearnerState
from tianji_jax.metrics import Meter, Report
from tianji_jax.parallel import Parallel
from tianji_jax.transport import Answer, Codec, Progress, RootLink, Together
from tianji_jax.types import ArraySpec, PyTree

logger = logging.getLogger(__name__)

ALONE_SECONDS = 20.0
"""How long a group hears nothing of its root before it says so."""


def fusing_codec(blueprint: Blueprint) -> Codec:
    """How what is fused is written on the wire: float32, whatever it is to the agent.

    Raises:
      ConfigError: the agent has nothing to fuse.
    """
    agent, config = _fusable(blueprint), blueprint.config
    found = jax.eval_shape(lambda rng: agent.to_fuse(blueprint.agent.init(rng)), jax.random.key(0))
    tree = config.model_dump(mode="json")
    run, groups = ("environment_steps", "stop_at_return"), ("every_learner_steps", "learning_rate", "momentum")
    common = {
        "environment": {key: tree["environment"][key] for key in ("name", "options")},
        "run": {key: tree["run"][key] for key in run},
        "groups": {key: tree["groups"][key] for key in groups},
        "agent": tree["agent"],
    }
    return Codec(jax.tree.map(lambda x: ArraySpec(x.shape, np.dtype(np.float32)), found), dict(flatten(common)))


class Membership:
    """The learner's side: everything but `report` is for the learner's thread.

    Attributes:
      courier: talks to the root, on a thread of its own; None but on the learner that leads.
      together: how all groups stood when this run heard of them last; None before.
      state: what a checkpoint has to hold.
    """

    def __init__(
        self, blueprint: Blueprint, parallel: Parallel, state: PyTree, meter: Meter, saved: dict[str, Any] | None
    ) -> None:
        """
        Args:
          blueprint: of the run.
          parallel: its devices.
          state: spec of the learner's state.
          meter: of the run; what the other groups count is added to it.
          saved: `state` of the run that this one goes on with.

        Raises:
          ConfigError: the agent has nothing to fuse, or keys cannot be used.
        """
        agent = _fusable(blueprint)
        self.together: Together | None = None
        # The name is kept, so that the root does not count twice what this run has done before.
        name = f"{socket.gethostname()[:40]}-{secrets.token_hex(4)}"
        self.state: dict[str, Any] = {"name": name, "elsewhere": 0} | (saved or {})
        self._world, self._parallel, self._meter = blueprint.world, parallel, meter
        self._every = blueprint.config.groups.every_learner_steps
        self._brought: int | None = None
        codec = fusing_codec(blueprint)
        self._copy = parallel.copier(state, lambda state: _as_float32(agent.to_fuse(state.train_state)))
        self._add = parallel.changer(lambda state, change: _add(agent, state, change), state, codec.spec)
        self._zeros = jax.tree.map(lambda spec: np.zeros(spec.shape, np.float32), codec.spec)
        self.courier: _Courier | None = None
        if self._world.leads:
            self.courier = _Courier(blueprint, codec, str(self.state["name"]), self._progress)

    @property
    def over(self) -> bool:
        """Whether all groups together have reached the end."""
        return self.together is not None and self.together.over

    @property
    def solved(self) -> bool:
        """Whether they have by `run.stop_at_return`."""
        return self.together is not None and self.together.solved

    def between_updates(self, state: LearnerState, version: int) -> LearnerState:
        """Bring and take over what there is; returns the state to go on with.

        Several learners have to agree, which they do when something is to be brought.
        """
        due = self._brought is None or (version % self._every == 0 and version != self._brought)
        if not (due or self._world.alone):
            return state
        change, together = (None, None) if self.courier is None else self.courier.take()
        if not self._world.alone:
            # On CPUs a collective that begins while another runs may meet that one on the other host.
            jax.block_until_ready(state)
            change, together = self._share(change, together)
        if together is not None:
            self._hear(together)
        if change is not None:
            state = self._add(state, self._parallel.replicate(change))
        if due:
            self._brought = version
            if self.courier is not None and self.courier.idle:
                self.courier.bring(self._copy(state))
        return state

    def report(self) -> Report:
        """What groups add to a report."""
        together = self.together
        return {} if together is None else {"groups": together.groups, "outer_steps": together.outer_steps}

    def _progress(self) -> Progress:
        return Progress(self._meter.environment_steps - self.state["elsewhere"], self._meter.window_return)

    def _hear(self, together: Together) -> None:
        more = together.elsewhere - self.state["elsewhere"]
        if more > 0:
            # In this order, so that `_progress` is at no time too high.
            self.state["elsewhere"] += more
            self._meter.elsewhere(more)
        self.together = together

    def _share(self, change: PyTree, together: Together | None) -> tuple[PyTree, Together | None]:
        """What learner 0 has heard, for every learner of this run."""
        found, told = self._world.share((change is not None, together))
        if found:
            change = self._world.share_arrays(self._zeros if change is None else change)
        return change, None if told is None else Together(*told)


class _Courier:
    """Carries what is fused between the learner and the root; `run` has a thread of its own.

    Attributes:
      ended: set once the run has ended for good, which the root is then told.
    """

    def __init__(self, blueprint: Blueprint, codec: Codec, name: str, progress: Callable[[], Progress]) -> None:
        config = blueprint.config
        assert config.groups.root is not None
        self.ended = False
        self._address, self._keys = config.groups.root, group_keys(config)
        self._codec, self._name, self._seed, self._progress = codec, name, config.run.seed, progress
        self._lock = threading.Lock()
        self._outgoing: PyTree = None
        self._incoming: tuple[PyTree, Together | None] = (None, None)
        self._under_way = False
        # The root's parameters as they were taken over last, and this run's as they were brought last.
        self._base: PyTree = None
        self._sent: PyTree = None
        self._heard, self._complained = time.monotonic(), False

    @property
    def idle(self) -> bool:
        """Whether something can be brought."""
        with self._lock:
            return not self._under_way

    def bring(self, own: PyTree) -> None:
        """Give it what is to be fused, device arrays of their own."""
        with self._lock:
            self._outgoing, self._under_way = own, True

    def take(self) -> tuple[PyTree, Together | None]:
        """What is to be added to what the run has, and how the groups stand; None where there is nothing new."""
        with self._lock:
            (change, together), self._incoming = self._incoming, (None, None)
            if change is not None:
                self._under_way = False
        return change, together

    def run(self, context: zmq.Context, stop: threading.Event) -> None:
        """Carry until `stop` is set.

        Raises:
          GroupsRefused: the root does not take this group.
        """
        link = RootLink(self._address, self._codec, context, self._keys, self._name, self._seed)
        try:
            while not stop.is_set():
                with self._lock:
                    own, self._outgoing = self._outgoing, None
                if own is not None:
                    self._bring(link, own)
                for answer in link.turn(self._progress()):
                    self._hear(answer)
                self._complain()
            link.end(self._progress(), self.ended)
        finally:
            link.close()

    def _bring(self, link: RootLink, own: PyTree) -> None:
        self._sent = jax.tree.map(np.asarray, own)
        if self._base is None:
            link.bring("join", self._sent)
        else:
            link.bring("push", _difference(self._sent, self._base))

    def _hear(self, answer: Answer) -> None:
        self._heard, self._complained = time.monotonic(), False
        with self._lock:
            change = self._incoming[0]
            if answer.kind == "fused" and self._sent is not None:
                self._base = answer.values
                change, self._sent = _difference(self._base, self._sent), None
            elif answer.kind == "join":
                self._base = self._sent = self._outgoing = None
                self._under_way = change is not None
            self._incoming = (change, answer.together)

    def _complain(self) -> None:
        silence = time.monotonic() - self._heard
        if silence > ALONE_SECONDS and not self._complained:
            self._complained = True
            logger.warning("nothing heard of the root at %s for %.0f s; training on alone", self._address, silence)


def _fusable(blueprint: Blueprint) -> CanBeFused:
    agent = blueprint.agent
    if not isinstance(agent, CanBeFused):
        raise ConfigError(
            f"groups.root: agent {blueprint.config.agent['name']!r} does not say what of it is to be fused: it needs "
            "to_fuse and with_fused (tianji_jax.agent.CanBeFused)"
        )
    return agent


def _difference(x: PyTree, y: PyTree) -> PyTree:
    # NumPy's difference of arrays without dimensions is a scalar.
    return jax.tree.map(lambda x, y: np.asarray(x - y), x, y)


def _as_float32(fused: Fused) -> Fused:
    return jax.tree.map(lambda x: x.astype(jnp.float32), fused)


def _add(agent: CanBeFused, state: LearnerState, change: Fused) -> LearnerState:
    fused = jax.tree.map(_plus, agent.to_fuse(state.train_state), change)
    return state._replace(train_state=agent.with_fused(state.train_state, fused))


def _plus(x: jax.Array, change: jax.Array) -> jax.Array:
    total = x.astype(jnp.float32) + change
    if jnp.issubdtype(x.dtype, jnp.integer):
        # The largest integer is none that float32 has: the next above it would wrap.
        most = np.nextafter(np.float32(jnp.iinfo(x.dtype).max), np.float32(0))
        total = jnp.minimum(jnp.round(total), most)
    return total.astype(x.dtype)
