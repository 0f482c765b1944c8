"""The same runs with the learner, and where asked the policy, on a GPU."""

import gzip
import json
from pathlib import Path
from typing import Any

import jax
import pytest

import tianji_jax
from short_runs import cartpole_config, train
from tianji_jax.chips import find_gpu
from tianji_jax.cli import main
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


def gpu_streams(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Begin and end of what ran on the GPU in a profiler trace, by the name of its stream."""
    (path,) = folder.rglob("*.trace.json.gz")
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    devices = {
        event["pid"]
        for event in events
        if event.get("name") == "process_name" and event["args"]["name"].startswith("/device:GPU")
    }
    names = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event.get("name") == "thread_name"
    }
    streams: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        name = names.get((event.get("pid"), event.get("tid")), "")
        if event.get("ph") == "X" and event["pid"] in devices and name.startswith("Stream"):
            streams.setdefault(name, []).append((event["ts"], event["ts"] + event["dur"]))
    return streams


def test_the_transfer_of_the_next_batch_overlaps_the_update(tmp_path: Path) -> None:
    config = cartpole_config(
        tmp_path,
        {
            "run": {"environment_steps": 2_000_000},
            "actors": {"environments": 2048, "unroll_length": 64},
            "learner": {"platform": "gpu"},
            "agent": {"name": "ppo", "epochs": 8, "minibatches": 8, "network": {"hidden_sizes": [1024, 1024]}},
        },
    )
    with jax.profiler.trace(str(tmp_path / "trace")):
        train(config)
    streams = gpu_streams(tmp_path / "trace")
    copies = [span for name, spans in streams.items() if "MemcpyH2D" in name for span in spans]
    kernels = [span for name, spans in streams.items() if "Memcpy" not in name for span in spans]
    assert copies, f"no copies to the GPU among the streams {sorted(streams)}"
    assert any(
        begin < end_kernel and begin_kernel < end for begin, end in copies for begin_kernel, end_kernel in kernels
    )


def test_the_update_is_compiled_and_measured_for_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(Path(__file__).parents[1] / "configs" / "cartpole_ppo.yaml")
    assert main(["compile", path, "--topology", "gpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["flops"] > 0
    if find_gpu(jax.devices("gpu")[0].device_kind) is not None:
        assert found["updates_per_second"] > 0
