"""The task that needs memory."""

import numpy as np
import pytest

from tianji_jax import environments

NAME = "tianji_jax.environments.memory:RecallCue"


def mean_return(delay: int, num_cues: int, remember: bool) -> float:
    envs, rng = environments.make(NAME, {"delay": delay, "num_cues": num_cues}, 64, 0, 1), np.random.default_rng(0)
    step, returns = envs.reset(), []
    cue = np.zeros(64, np.int64)
    for _ in range(40 * (delay + 3)):
        shown = step.observation[:, :num_cues]
        assert (shown.sum(1) == step.is_first).all()  # the cue is to be seen in the first step only
        cue = np.where(step.is_first, shown.argmax(1), cue)
        step = envs.step(cue if remember else rng.integers(0, num_cues, 64))
        returns += [episode.episode_return for episode in step.episodes]
        assert all(episode.length == delay + 2 for episode in step.episodes)
    assert len(returns) == 40 * 64
    return float(np.mean(returns))


@pytest.mark.parametrize(("delay", "num_cues"), [(0, 2), (8, 2), (3, 4)])
def test_memory_solves_it_and_chance_is_zero(delay: int, num_cues: int) -> None:
    assert mean_return(delay, num_cues, remember=True) == 1
    assert abs(mean_return(delay, num_cues, remember=False)) < 0.08  # 4 standard errors


def test_the_moment_to_recall_is_shown() -> None:
    envs = environments.make(NAME, {"delay": 2}, 1, 0, 1)
    flags = [envs.reset().observation[0, -1]]
    flags += [envs.step(np.zeros(1, np.int32)).observation[0, -1] for _ in range(8)]
    assert flags == [0, 0, 0, 1, 0, 0, 0, 0, 1]


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="delay is -1"):
        environments.make_spec(NAME, {"delay": -1})
    with pytest.raises(ValueError, match="num_cues is 1"):
        environments.make_spec(NAME, {"num_cues": 1})
