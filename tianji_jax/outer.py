"""How the parameters of groups that train together become one."""

from collections.abc import Sequence

import numpy as np


class OuterOptimiser:
    """Descends along what the groups bring, each as it comes: none waits for another.

    A group brings the change it has made since it last took over these values. With `N` groups, learning rate `a`,
    momentum `b`, and `g = -change / N`, this is Delayed Nesterov (Liu et al. 2024, arXiv 2401.09135, algorithm 3, with
    c = 0):

        v = v - a * g                                for each change
        m = b * m + mean of the last N changes' -change,  v = v - a * b * m        after every N-th

    When each group has brought one change from the same values, that is a step of Nesterov momentum along the mean
    change, as in DiLoCo (Douillard et al. 2023, arXiv 2311.08105); with `a = 1` and `b = 0` the values then are the
    mean of the groups' own: plain averaging.

    Attributes:
      values: float32 arrays; never written to, each step makes new ones.
    """

    def __init__(self, start: Sequence[np.ndarray], learning_rate: float, momentum: float) -> None:
        """
        Args:
          start: float32 arrays.
          learning_rate: `a`.
          momentum: `b`.
        """
        self.values: list[np.ndarray] = [np.array(x, np.float32) for x in start]
        # Python's numbers leave float32 arrays what they are.
        self._learning_rate, self._momentum = float(learning_rate), float(momentum)
        self._velocity: list[np.ndarray] = [np.zeros_like(x) for x in self.values]
        self._gathered: list[np.ndarray] = [np.zeros_like(x) for x in self.values]
        self._arrived = 0

    def step(self, change: Sequence[np.ndarray], groups: int) -> None:
        """Take in one group's change.

        Args:
          change: float32 arrays of the shapes of `values`.
          groups: `N`, that are there now.
        """
        rate, momentum = self._learning_rate, self._momentum
        # `np.asarray` below: NumPy's sum of arrays without dimensions is a scalar.
        parts = [x / groups for x in change]
        self.values = [np.asarray(value + rate * part) for value, part in zip(self.values, parts, strict=True)]
        if not momentum:
            return
        self._gathered = [gathered + part for gathered, part in zip(self._gathered, parts, strict=True)]
        self._arrived += 1
        if self._arrived < groups:
            return
        pairs = zip(self._velocity, self._gathered, strict=True)
        self._velocity = [momentum * velocity + gathered for velocity, gathered in pairs]
        pairs = zip(self.values, self._velocity, strict=True)
        self.values = [np.asarray(value + rate * momentum * velocity) for value, velocity in pairs]
        self._gathered = [np.zeros_like(x) for x in self.values]
        self._arrived = 0
