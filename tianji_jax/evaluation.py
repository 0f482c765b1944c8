"""How well a saved policy plays: fresh environments, frozen parameters, figures with their uncertainty."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from rich.table import Table

from tianji_jax.config import Config, ConfigError
from tianji_jax.environments import EnvironmentConfigError, Environments, make
from tianji_jax.saved_policy import SavedPolicy, load_policy
from tianji_jax.types import PyTree

FIRST_SEED = 2**30
"""Environments of evaluations are seeded from here upwards: training runs with everyday seeds are far below."""

MAX_SEED = 2**29

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
    return play(load_policy(Path(run), best=best), episodes, greedy, seed)


def play(policy: SavedPolicy, episodes: int, greedy: bool, seed: int) -> Evaluation:
    """Exactly so many episodes; as `evaluate`.

    Each environment plays a number that is settled beforehand: of whatever ends first, too many would be short.
    """
    if episodes < 1:
        raise ConfigError(f"--episodes: got {episodes}; it should be 1 or more")
    count = min(episodes, policy.config.actors.environments)
    quota = np.full(count, episodes // count) + (np.arange(count) < episodes % count)
    act, environments = chooser(policy, greedy, seed), fresh_environments(policy.config, count, seed)
    state, found = policy.agent.initial_state(count), []
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
    return Evaluation(returns, lengths, policy.version, greedy)


def fresh_environments(config: Config, count: int, seed: int, **options: Any) -> Environments:
    """The run's environments with other seeds than in training, playing whole games; `options` replace its own.

    Raises:
      ConfigError: the seed is out of range, or they cannot be made.
    """
    if not 0 <= seed < MAX_SEED:
        raise ConfigError(f"--seed: got {seed}; it should be from 0 to {MAX_SEED - 1}")
    environment, actors = config.environment, config.actors
    options = {**environment.options, **options}
    if "episodic_life" in options:  # whole games, also where training ends an episode with each life
        options["episodic_life"] = False
    first = FIRST_SEED + seed * actors.environments % (2**30 - count)
    try:
        return make(environment.name, options, count, first, actors.environment_threads)
    except EnvironmentConfigError as error:
        raise ConfigError(str(error)) from None


def chooser(policy: SavedPolicy, greedy: bool, seed: int) -> Callable[..., tuple[jax.Array, PyTree]]:
    """How the policy acts: `(number of the call, observation, is_first, state) -> action, next state`.

    Raises:
      ConfigError: the agent cannot be greedy.
    """
    if greedy:
        policy.require_greedy()
    root, params, agent = jax.random.key(seed), policy.params, cast(Any, policy.agent)

    def choose(call: jax.Array, observation: PyTree, is_first: jax.Array, state: PyTree) -> Any:
        if greedy:
            return agent.act_greedy(params, observation, is_first, state)
        action, _, state = agent.act(params, jax.random.fold_in(root, call), observation, is_first, state)
        return action, state

    return jax.jit(choose)


def interquartile_mean(values: np.ndarray) -> float:
    """Mean of the middle half of `[N]` (Agarwal et al. 2021, "Deep RL at the Edge of the Statistical Precipice").

    A quarter of N that is not whole is rounded down: fewer than 4 values all count.
    """
    cut = len(values) // 4
    return float(np.sort(values)[cut : len(values) - cut].mean())


def bootstrap(values: np.ndarray, estimate: Callable[[np.ndarray], Any]) -> Interval:
    """Percentile bootstrap of an estimate (Efron 1979) over episodes `[N]`; the same values give the same interval."""
    rng, size = np.random.default_rng(0), len(values)
    estimates = [estimate(values[rng.integers(size, size=size)]) for _ in range(RESAMPLES)]
    low, high = np.quantile(estimates, [0.025, 0.975])
    return Interval(float(estimate(values)), float(low), float(high))


def table(evaluations: list[Evaluation]) -> Table:
    """Evaluations side by side, for the terminal."""
    shown = Table(
        title=f"policy version {evaluations[0].version}, {len(evaluations[0].returns):,} episodes",
        caption=(
            "IQM: interquartile mean, the middle half's\n"
            f"95 %: interval by percentile bootstrap over episodes, {RESAMPLES:,} resamples"
        ),
        min_width=60,
    )
    for heading in ("", "mean (95 %)", "median", "IQM (95 %)", "length"):
        shown.add_column(heading, justify="right" if heading else "left")
    for evaluation in evaluations:
        mean, iqm = (f"{x.value:,.1f} ({x.low:,.1f} to {x.high:,.1f})" for x in (evaluation.mean, evaluation.iqm))
        mode = "greedy" if evaluation.greedy else "sampled"
        shown.add_row(mode, mean, f"{evaluation.median.value:,.1f}", iqm, f"{evaluation.lengths.mean():,.1f}")
    return shown
