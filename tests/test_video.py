"""Films show the episode that was played, step by step; what cannot be filmed is told before anything is played."""

import sys
from pathlib import Path
from typing import Any

import av
import gymnasium
import numpy as np
import pytest

import tianji_jax
from short_runs import cartpole_config, counting_config
from tianji_jax.cli import main
from tianji_jax.saved_policy import load_policy
from tianji_jax.video import film


class Shades(gymnasium.Env[Any, Any]):
    """Episodes of 6 steps; each is seen as a brighter picture of 33 x 47 pixels."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return np.zeros(1, np.float32), 1.0, self.steps == 6, False, {}

    def render(self) -> Any:
        return np.full((33, 47, 3), 40 * self.steps, np.uint8) if self.render_mode == "rgb_array" else None


def frames(path: Path) -> list[np.ndarray]:
    with av.open(path) as file:
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]


def test_every_step_of_one_episode_is_a_frame(tmp_path: Path) -> None:
    environment = {"environment": {"name": f"{__name__}:Shades", "options": {}}}
    run = tianji_jax.train(counting_config(tmp_path, environment), show=False).path
    path = tmp_path / "film.mp4"
    assert film(load_policy(run), path, greedy=False, seed=0) == 7
    seen = frames(path)
    assert [frame.shape for frame in seen] == [(34, 48, 3)] * 7
    np.testing.assert_allclose([frame.mean() for frame in seen], np.arange(7) * 40, atol=3)


def test_the_command_films_and_evaluates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tianji_jax.train(cartpole_config(tmp_path), show=False).path
    path = tmp_path / "film.mp4"
    assert main(["eval", str(run), "--episodes", "2", "--sampled", "--video", str(path)]) == 0
    output = capsys.readouterr().out
    seen = frames(path)
    assert f"an episode sampled, {len(seen)} frames" in output
    assert "greedy" not in output
    assert seen[0].shape == (400, 600, 3)
    assert np.abs(seen[0].astype(int) - seen[-1]).max() > 100


def refusal(run: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a film is refused."""
    assert main(["eval", str(run), "--video", str(path)]) == 2
    told = capsys.readouterr()
    assert not told.out
    assert len(told.err.splitlines()) == 1
    return told.err


def test_what_cannot_be_filmed_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tianji_jax.train(counting_config(tmp_path), show=False).path
    assert "has no option 'render_mode'" in refusal(run, tmp_path / "film.mp4", capsys)
    assert "should end in .mp4" in refusal(run, tmp_path / "film.gif", capsys)
    monkeypatch.setitem(sys.modules, "av", None)
    assert "pip install 'tianji_jax[video]'" in refusal(run, tmp_path / "film.mp4", capsys)


def test_a_folder_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = {"environment": {"name": f"{__name__}:Shades", "options": {}}}
    run = tianji_jax.train(counting_config(tmp_path, environment), show=False).path
    assert "cannot write" in refusal(run, tmp_path / "nowhere" / "film.mp4", capsys)


def test_tasks_of_envpool_without_pictures_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tianji_jax.train(cartpole_config(tmp_path, {"environment": {"name": "envpool:Catch-v0"}}), show=False).path
    assert "render not implemented" in refusal(run, tmp_path / "film.mp4", capsys)


def test_mujoco_without_opengl_does_not_take_the_process_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tianji_jax.train(cartpole_config(tmp_path, {"environment": {"name": "envpool:Hopper-v4"}}), show=False).path
    path = tmp_path / "film.mp4"
    if main(["eval", str(run), "--episodes", "1", "--video", str(path)]) == 0:
        assert len(frames(path)) > 1  # there is OpenGL here
    else:
        assert "OpenGL" in capsys.readouterr().err
