"""How well a saved policy plays: fresh environments, frozen parameters, figures with their uncertainty."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from rich.table import Table

from tianji_jax.blueprint import plan
from tianji_jax.checkpoint import restore
from tianji_jax.config import ConfigError, load
from tianji_jax.environments import Environments, make
from tianji_jax.learner import init_state
from tianji_jax.parallel import Parallel
from tianji_jax.run_folder import CONFIG
from tianji_jax.types import PyTree

FIRST_SEED = 2**30
"""Environments of evaluations are seeded from here upwards: training runs with everyday seeds are far below."""

RESAMPLES = 2000
"""Of the bootstrap; its 95 % intervals then repeat to about a hundredth of their width."""


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Evaluation:
    """Episodes of one policy.

    Attributes:
      returns: float64 `[N]`, the games' own, unclipped.
      lengths: int64 `[N]`, environment steps.
      version: the policy version.
      greedy: the policy's mode was played, not a sample.
    """

    returns: np.ndarray
    lengths: np.ndarray
    version: int
    greedy: bool

    @property
    def mean(self) -> Interval:
        """Mean return."""
        return bootstrap(self.returns, np.mean)

    @property
    def median(self) -> Interval:
        """Median return."""
        return bootstrap(self.returns, np.median)

    @property
    def iqm(self) -> Interval:
        """Interquartile mean of the returns."""
        return bootstrap(self.returns, interquartile_mean)


def evaluate(
    run: str | Path, episodes: int = 100, *, best: bool = False, greedy: bool = False, seed: int = 0
) -> Evaluation:
    """Play the policy of a run's newest checkpoint, on the CPU. The run may be training meanwhile.

    Args:
      run: its folder.
      episodes: how many.
      best: take the checkpoint with the highest mean return of 100 episodes instead.
      greedy: play the policy's mode.
      seed: of the environments and of sampling; different seeds give different episodes.

    Raises:
      ConfigError: there is no such run or checkpoint, or the agent cannot be greedy.
    """
    player = _Player(Path(run), episodes, best, seed)
    if greedy and not player.can_be_greedy:
        raise ConfigError(f"agent.name: {player.agent_name} has no act_greedy, so it can only be sampled")
    return player.play(greedy)


def both(run: str | Path, episodes: int = 100, *, best: bool = False, seed: int = 0) -> list[Evaluation]:
    """The same policy sampled and, where the agent can be, greedy; as `evaluate`."""
    player = _Player(Path(run), episodes, best, seed)
    return [player.play(greedy) for greedy in (False, True) if player.can_be_greedy or not greedy]


def interquartile_mean(values: np.ndarray, axis: int | None = None) -> Any:
    """Mean of the middle half (Agarwal et al. 2021, "Deep RL at the Edge of the Statistical Precipice", section 4).

    Args:
      values: float `[..., N]`.
      axis: -1, or None for a vector.
    """
    ordered = np.sort(values, axis=-1)
    cut = ordered.shape[-1] // 4
    return ordered[..., cut : ordered.shape[-1] - cut].mean(axis=axis)


def bootstrap(values: np.ndarray, estimate: Any) -> Interval:
    """Percentile bootstrap of an estimate (Efron 1979) over episodes `[N]`; the same values give the same interval."""
    rng = np.random.default_rng(0)
    resampled = values[rng.integers(len(values), size=(RESAMPLES, len(values)))]
    low, high = np.quantile(estimate(resampled, axis=-1), [0.025, 0.975])
    return Interval(float(estimate(values)), float(low), float(high))


def table(evaluations: list[Evaluation]) -> Table:
    """Evaluations side by side, for the terminal."""
    shown = Table(
        title=f"policy version {evaluations[0].version}, {len(evaluations[0].returns)} episodes", min_width=60
    )
    for heading in ("", "mean (95 %)", "median", "interquartile mean (95 %)", "length"):
        shown.add_column(heading, justify="right" if heading else "left")
    for evaluation in evaluations:
        mean, iqm = (f"{x.value:,.1f} ({x.low:,.1f} to {x.high:,.1f})" for x in (evaluation.mean, evaluation.iqm))
        median = f"{evaluation.median.value:,.1f}"
        shown.add_row(
            "greedy" if evaluation.greedy else "sampled", mean, median, iqm, f"{evaluation.lengths.mean():,.1f}"
        )
    return shown


class _Player:
    """A saved policy and where it plays."""

    def __init__(self, run: Path, episodes: int, best: bool, seed: int) -> None:
        if not (run / CONFIG).is_file():
            raise ConfigError(f"{run} is no run: {CONFIG} is missing")
        if episodes < 1:
            raise ConfigError(f"--episodes: got {episodes}; it should be 1 or more")
        if not 0 <= seed < 2**29:
            raise ConfigError(f"--seed: got {seed}; it should be from 0 to {2**29 - 1}")
        config = load(run / CONFIG)
        blueprint = plan(config)
        self._config, self._agent, self._episodes, self._seed = config, blueprint.agent, episodes, seed
        cpu = jax.local_devices(backend="cpu")[:1]
        spec = Parallel(cpu, "shard_map").spec(jax.eval_shape(lambda: init_state(blueprint.agent, 0)))
        saved = restore(run, spec, best=best)
        self._version = saved.version
        self._params = blueprint.agent.actor_params(saved.state.train_state)

    @property
    def agent_name(self) -> str:
        return str(self._config.agent["name"])

    @property
    def can_be_greedy(self) -> bool:
        """Whether the agent has `act_greedy(params, observation, is_first, state) -> action, state`."""
        return hasattr(self._agent, "act_greedy")

    def play(self, greedy: bool) -> Evaluation:
        """Exactly so many episodes.

        Each environment plays a number that is settled beforehand: of whatever ends first, too many would be short.
        """
        count = min(self._episodes, self._config.actors.environments)
        quota = np.full(count, self._episodes // count) + (np.arange(count) < self._episodes % count)
        environments, act = self._make(count), self._chooser(greedy)
        state, found = self._agent.initial_state(count), []
        try:
            step, call = environments.reset(), 0
            while quota.any():
                action, state = act(np.uint32(call), step.observation, step.is_first, state)
                step, call = environments.step(np.asarray(action)), call + 1
                for index, episode in zip(np.flatnonzero(step.terminated | step.truncated), step.episodes, strict=True):
                    if quota[index]:
                        quota[index] -= 1
                        found.append(episode)
        finally:
            environments.close()
        returns = np.array([episode.episode_return for episode in found], np.float64)
        lengths = np.array([episode.length for episode in found], np.int64)
        return Evaluation(returns, lengths, self._version, greedy)

    def _make(self, count: int) -> Environments:
        environment = self._config.environment
        options = dict(environment.options)
        if "episodic_life" in options:  # whole games, also where training ends an episode with each life
            options["episodic_life"] = False
        seed = FIRST_SEED + self._seed * self._config.actors.environments % (2**30 - count)
        return make(environment.name, options, count, seed, self._config.actors.environment_threads)

    def _chooser(self, greedy: bool) -> Callable[..., tuple[jax.Array, PyTree]]:
        root, params, agent = jax.random.key(self._seed), self._params, cast(Any, self._agent)

        def choose(call: jax.Array, observation: PyTree, is_first: jax.Array, state: PyTree) -> Any:
            if greedy:
                return agent.act_greedy(params, observation, is_first, state)
            action, _, state = agent.act(params, jax.random.fold_in(root, call), observation, is_first, state)
            return action, state

        return jax.jit(choose)
