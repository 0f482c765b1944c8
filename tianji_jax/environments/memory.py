"""A task that no policy without memory can solve, for the tests of recurrent agents."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class RecallCue(gymnasium.Env):
    """A cue is shown in the first step only and must be recalled after `delay` blank steps.

    An episode has `delay + 2` steps. Observation, float32 `[num_cues + 1]`: the cue, one-hot, in the first step;
    then zeros; in the last step its last entry is 1: recall now. The action of the last step is rewarded with 1 if
    it is the cue's number and with `-1 / (num_cues - 1)` otherwise; all others with 0. So the best return is 1, and
    the expected return of any policy without memory is 0.
    """

    def __init__(self, delay: int = 8, num_cues: int = 2) -> None:
        if delay < 0:
            raise ValueError(f"delay is {delay}, allowed is 0 or more")
        if num_cues < 2:
            raise ValueError(f"num_cues is {num_cues}, allowed is 2 or more")
        self.observation_space = spaces.Box(0, 1, (num_cues + 1,), np.float32)
        self.action_space = spaces.Discrete(num_cues)
        self._last_step = delay + 1
        self._num_cues = num_cues
        self._cue = self._step = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._cue, self._step = int(self.np_random.integers(self._num_cues)), 0
        return self._observation(hot=self._cue), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        over = self._step == self._last_step
        reward = 0.0
        if over:
            reward = 1.0 if action == self._cue else -1.0 / (self._num_cues - 1)
        self._step += 1
        recall = self._step == self._last_step
        return self._observation(hot=self._num_cues if recall else None), reward, over, False, {}

    def _observation(self, hot: int | None) -> np.ndarray:
        observation = np.zeros(self._num_cues + 1, np.float32)
        if hot is not None:
            observation[hot] = 1
        return observation
