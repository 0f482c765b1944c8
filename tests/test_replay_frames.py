"""Stacked frames in replay come back as they were seen, and take the memory of single ones."""

from collections import deque
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tianji_jax
from short_runs import counting_config, train, values
from tianji_jax.blueprint import plan
from tianji_jax.config import Config, ConfigError, validate
from tianji_jax.device_queue import Shard
from tianji_jax.replay import Replay
from tianji_jax.replay_frames import FrameStacks
from tianji_jax.types import ArraySpec
from tianji_jax.worker import WorkerError

H, W = 2, 3


class Snow(gymnasium.Env[np.ndarray, int]):
    """Images that have nothing to do with each other."""

    observation_space = gymnasium.spaces.Box(0, 255, (4, 12, 12), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self._image(), {}

    def step(self, action: int) -> Any:
        return self._image(), 0.0, False, False, {}

    def _image(self) -> np.ndarray:
        return self.np_random.integers(0, 256, (4, 12, 12), np.uint8)


def seen(rng: np.random.Generator, begins: list[str], frames: int, channels: int) -> np.ndarray:
    """Stacks `[len(begins), frames * channels, H, W]` of a player: in each step a frame is added ("."), or an episode
    begins with nothing but its first frame ("r")."""
    stack: deque[np.ndarray] = deque((_frame(rng, channels) for _ in range(frames)), maxlen=frames)
    stacks = []
    for begin in begins:
        stack.extend([_frame(rng, channels)] * (frames if begin == "r" else 1))
        stacks.append(np.concatenate(stack))
    return np.array(stacks)


def _frame(rng: np.random.Generator, channels: int) -> np.ndarray:
    # Few values, so that frames are equal by chance, too.
    return rng.integers(0, 2, (channels, H, W), np.uint8)


@settings(max_examples=40, deadline=None)
@given(
    begins=st.lists(st.lists(st.sampled_from("...r"), min_size=7, max_size=7), min_size=2, max_size=2),
    frames=st.sampled_from([2, 4]),
    channels=st.sampled_from([1, 3]),
    seed=st.integers(0, 1000),
)
def test_stacks_come_back_as_they_were_seen(begins: list[list[str]], frames: int, channels: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    images = np.stack([seen(rng, rows, frames, channels) for rows in begins])[:, None]  # [b, 1, T + 1, ...]
    observation = {"image": images, "speed": rng.normal(size=(2, 1, 7)).astype(np.float32)}
    specs = jax.tree.map(lambda x: ArraySpec((7, 2, *x.shape[3:]), x.dtype), observation)
    stacks = FrameStacks(frames, specs)
    held, torn = stacks.take_apart(observation)
    assert torn == 0
    assert held["image"].frame.shape == (2, 1, 6 + frames, channels, H, W)

    row, step = np.meshgrid(np.arange(2), np.arange(7), indexing="ij")
    back = stacks.at(held, row.ravel(), np.zeros(14, np.int32), step.ravel())
    for name, x in observation.items():
        assert back[name].dtype == x.dtype
        np.testing.assert_array_equal(back[name], x[:, 0].reshape(14, *x.shape[3:]))
    whole = stacks.at(held, np.arange(2), np.zeros(2, np.int32), np.broadcast_to(np.arange(7)[:, None], (7, 2)))
    np.testing.assert_array_equal(whole["image"], np.moveaxis(images[:, 0], 0, 1))


def test_what_is_no_stack_is_noticed() -> None:
    rng = np.random.default_rng(0)
    images = np.stack([seen(rng, list("......."), 4, 1) for _ in range(2)])[:, None]
    images[1, 0, 3, 1] += 1  # differs from the one before it and the one after
    stacks = FrameStacks(4, ArraySpec((7, 2, 4, H, W), np.uint8))
    _, torn = stacks.take_apart(images)
    assert torn == 2
    with pytest.raises(ConfigError, match=r"replay\.frame_stack is 4, but 2 observations were neither"):
        stacks.check(float(torn))


def test_observations_that_cannot_be_stacks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"replay\.frame_stack is 4, .* there is float32\[4\]; leave it out"):
        FrameStacks(4, ArraySpec((7, 2, 4), np.float32))
    with pytest.raises(ConfigError, match=r"uint8\[3,84,84\]"):
        FrameStacks(4, {"image": ArraySpec((7, 2, 3, 84, 84), np.uint8)})


def atari(directory: Path, **replay: Any) -> Config:
    return counting_config(
        directory,
        {
            "run": {"environment_steps": 1500},
            "environment": {
                "name": "envpool:Breakout-v5",
                "options": {"img_height": 20, "img_width": 20, "stack_num": 4, "episodic_life": True},
            },
            "actors": {"environments": 4, "unroll_length": 20},
            "replay": {"capacity": 1200, "min_size": 100, "batch_size": 8, "samples_per_insert": 0.2} | replay,
            "agent": {"name": "dqn", "n_step": 3, "network": {"torso": "small_cnn", "hidden_sizes": [8]}},
        },
        {},
    )


def test_a_game_is_learned_from_frames_that_are_held_once(tmp_path: Path) -> None:
    # Lives are lost by then, and an episode that goes on with another life has no new stack.
    _, reports = train(atari(tmp_path, frame_stack=4))
    assert sum(values(reports, "episodes")) > 0
    torn = values(reports, "learner/torn_stacks")
    assert torn
    assert not any(torn)


def test_frames_take_a_quarter_of_the_memory_of_their_stacks(tmp_path: Path) -> None:
    sizes = []
    for frame_stack in (None, 4):
        config = atari(tmp_path, frame_stack=frame_stack)
        blueprint = plan(config)
        shard = Shard(blueprint.trajectory, ArraySpec((4,), np.int32))
        sizes.append(Replay(config.replay, blueprint.agent.replay, shard, 1).nbytes)
    # 20 steps have 24 frames, or 84.
    assert sizes[1] / sizes[0] == pytest.approx(24 / 84, rel=0.05)


def test_a_run_ends_where_images_are_no_stacks(tmp_path: Path) -> None:
    config = atari(tmp_path, frame_stack=4).model_dump()
    config["environment"] = {"name": "test_replay_frames:Snow", "options": {}}
    with pytest.raises(WorkerError, match=r"replay\.frame_stack is 4, but .* leave it out for this environment"):
        tianji_jax.train(validate(config), show=False)
