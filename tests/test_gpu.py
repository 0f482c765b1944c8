"""The same runs with the learner, and where asked the policy, on a GPU."""

from pathlib import Path
from typing import Any

import jax
import pytest

import tianji_jax
from short_runs import cartpole_config, train
from tianji_jax.parallel import actor_device, learner_devices


def _has_gpu() -> bool:
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _has_gpu(), reason="JAX finds no GPU on this machine")]


@pytest.mark.parametrize("placement", ["thread", "process"])
@pytest.mark.parametrize("device", ["cpu", "accelerator"])
def test_the_same_run_trains_on_the_gpu(tmp_path: Path, placement: str, device: str) -> None:
    config = cartpole_config(
        tmp_path, {"learner": {"platform": "gpu"}, "actors": {"placement": placement, "device": device}}
    )
    devices = learner_devices(config.learner)
    assert {d.platform for d in devices} == {"gpu"}
    assert actor_device(config.actors.device, devices, 0).platform == ("gpu" if device == "accelerator" else "cpu")
    result, reports = train(config)
    assert result.environment_steps >= 400
    assert reports[-1]["updates_skipped"] == 0


def test_cartpole_is_solved_on_the_gpu(tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "configs" / "cartpole_ppo.yaml"
    overrides: list[Any] = [f"run.directory={tmp_path}", "learner.platform=gpu"]
    assert tianji_jax.train(tianji_jax.load(path, overrides), show=False).solved
