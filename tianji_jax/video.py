"""A film of one episode of a saved policy."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tianji_jax.config import ConfigError
from tianji_jax.environments import EnvironmentConfigError, Environments, make
from tianji_jax.evaluation import chooser, fresh_environments
from tianji_jax.saved_policy import SavedPolicy

FRAMES_PER_SECOND = 30
"""One frame is one environment step."""

MAX_FRAMES = 20_000
"""Episodes that go on for longer are cut: eleven minutes."""

_PROBE_SECONDS = 60
_PROBE = "import sys, json; from tianji_jax.video import first_picture; first_picture(*json.loads(sys.argv[1]))"


def film(policy: SavedPolicy, path: Path, greedy: bool, seed: int) -> int:
    """Play one episode and write it as H.264 to `path`, an .mp4 file; returns the number of frames.

    Args:
      policy: who plays.
      path: is replaced if it exists.
      greedy: play the policy's mode.
      seed: as in `tianji_jax.evaluate`.

    Raises:
      ConfigError: the environment cannot be seen, the extra `video` is missing, the file cannot be written, or the
        agent cannot be greedy.
    """
    if path.suffix != ".mp4":
        raise ConfigError(f"--video: got {path}; its name should end in .mp4")
    try:
        import av
    except ImportError:
        raise ConfigError("--video needs av: pip install 'tianji_jax[video]'") from None
    _check_visible(policy)
    act = chooser(policy, greedy, seed)
    environments = fresh_environments(policy.config, 1, seed, render_mode="rgb_array")
    frames, partial = 0, path.with_name(f".{path.name}.partial")
    try:
        with av.open(partial, "w", format="mp4") as file:
            stream: Any = None
            for picture in _episode(policy, act, environments):
                if stream is None:
                    stream = file.add_stream("libx264", rate=FRAMES_PER_SECOND)
                    stream.height, stream.width, stream.pix_fmt = *picture.shape[:2], "yuv420p"
                file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
                frames += 1
            file.mux(stream.encode())
        partial.replace(path)
    except EnvironmentConfigError as error:
        raise ConfigError(f"--video: {error}") from None
    except OSError as error:
        raise ConfigError(f"--video: cannot write {path}: {error.strerror}") from None
    finally:
        environments.close()
        partial.unlink(missing_ok=True)
    return frames


def _episode(policy: SavedPolicy, act: Any, environments: Environments) -> Iterator[np.ndarray]:
    """The pictures of one episode, first and last included, of even height and width: H.264 takes no others."""
    step, state = environments.reset(), policy.agent.initial_state(1)
    for call in range(MAX_FRAMES):
        picture = environments.render()
        height, width = picture.shape[:2]
        yield np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        if step.terminated[0] or step.truncated[0]:
            return
        action, state = act(np.uint32(call), step.observation, step.is_first, state)
        step = environments.step(np.asarray(action))


def _check_visible(policy: SavedPolicy) -> None:
    """Look once before anything is played, and in a process of its own: MuJoCo inside EnvPool ends it without OpenGL.

    Environments in Python are looked at here, which is quicker; they raise.
    """
    environment = policy.config.environment
    options = {**environment.options, "render_mode": "rgb_array"}
    if not environment.name.startswith("envpool:"):
        try:
            first_picture(environment.name, options)
        except EnvironmentConfigError as error:
            raise ConfigError(f"--video: {error}") from None
        return
    with tempfile.TemporaryDirectory() as scratch:  # MuJoCo leaves a log where it fails
        try:
            looked = subprocess.run(
                [sys.executable, "-c", _PROBE, json.dumps([environment.name, options])],
                capture_output=True,
                text=True,
                timeout=_PROBE_SECONDS,
                cwd=scratch,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"--video: environment {environment.name!r} showed nothing within {_PROBE_SECONDS} s"
            ) from None
    if looked.returncode:
        lines = (looked.stderr + looked.stdout).strip().splitlines()
        reason = lines[-1].rpartition("EnvironmentConfigError: ")[2] if lines else f"exit code {looked.returncode}"
        raise ConfigError(f"--video: environment {environment.name!r} cannot be seen here: {reason}")


def first_picture(name: str, options: Mapping[str, Any]) -> np.ndarray:
    """How an environment looks after its reset.

    Raises:
      EnvironmentConfigError: there is nothing to see, or no such environment.
    """
    environments = make(name, options, num_environments=1, seed=0, threads=1)
    try:
        environments.reset()
        return environments.render()
    finally:
        environments.close()
