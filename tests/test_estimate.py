"""The roofline against numbers worked out by hand."""

from collections import Counter
from typing import Any

import pytest

from tianji_jax.chips import GPUS, SHAPES, TPUS, find_gpu, find_topology, wire_bytes
from tianji_jax.estimate import Machine, Memory, Work, estimate, lines
from tianji_jax.hlo import Traffic

V5E = Machine("TPU v5e, v5e:4x4", TPUS["v5e"], TPUS["v5e"].memory, devices=16, hosts=4, links=2)
MEMORY = Memory(1e9, 2e9, 3e9, 4e9, 0.5e9, 0.25e9, 0.125e9, 0.0625e9)


def report(machine: Machine = V5E, held: Memory = MEMORY, **traffic: Any) -> dict[str, Any]:
    moved = Traffic(memory=traffic.get("memory", 0.0), payload=Counter(traffic.get("payload", {})), collectives=3)
    work = Work(traffic.get("flops", 0.0), moved, steps=4096, frame_skip=4, batch=1e6)
    return {"run": "ppo on a game", **estimate(machine, held, work)}


@pytest.mark.parametrize(
    ("work", "limit", "seconds"),
    [
        # 197 TFLOP at 197 TFLOP/s; 819 GB at 819 GB/s.
        ({"flops": 197e12, "memory": 8.19e9}, "compute", 1.0),
        ({"flops": 1e12, "memory": 1638e9}, "memory", 2.0),
        # Each of 16 devices sends 2 x 15/16 of 80 GB on two links of 50 GB/s.
        ({"flops": 1e12, "memory": 8.19e9, "payload": {"all-reduce": 80e9}}, "interconnect", 1.5),
    ],
)
def test_the_slowest_of_three_limits(work: dict[str, Any], limit: str, seconds: float) -> None:
    found = report(**work)
    assert found["limited_by"] == limit
    assert found["seconds"][limit] == pytest.approx(seconds)
    assert found["updates_per_second"] == pytest.approx(1 / seconds)
    assert found["environment_steps_per_second"] == pytest.approx(4096 / seconds)
    assert found["frames_per_second"] == pytest.approx(4 * 4096 / seconds)
    assert found["bytes_per_second_and_host"] == pytest.approx(1e6 / seconds)


def test_memory_is_summed_and_compared() -> None:
    found = report(flops=1.0)
    assert found["memory"]["sum"] == 10.9375e9
    assert found["fits"]
    assert "fits: 64.7% of 15.75 GiB" in "\n".join(lines(found))
    larger = report(held=Memory(1e9, 2e9, 10e9, 4e9, 0, 0, 0, 0), flops=1.0)
    assert larger["fits"] is False
    assert "DOES NOT FIT: 100.5%" in "\n".join(lines(larger))


def test_where_nothing_is_known_nothing_is_estimated() -> None:
    found = report(Machine("CPU", None, None, devices=4), flops=1e9, memory=1e6)
    assert found["updates_per_second"] is None
    assert found["fits"] is None
    text = "\n".join(lines(found))
    assert "1 GFLOP" in text
    assert "no estimate of the rate" in text


@pytest.mark.parametrize(
    ("name", "links"),
    [
        ("v5e:1x1", 0),
        ("v5e:2x2", 2),  # one link to the one neighbour on each axis
        ("v5e:4x4", 2),  # open lines
        ("v6e:8x16", 3),  # one of them closed to a ring
        ("v5e:16x16", 4),
        ("v4:2x2x1", 2),
        ("v5p:2x2x4", 3),
        ("v5p:4x4x4", 6),
    ],
)
def test_rings_have_two_links_lines_have_one(name: str, links: int) -> None:
    assert find_topology(name).ring_links == links


def test_a_chip_uses_no_more_links_than_it_has() -> None:
    for generation, shapes in SHAPES.items():
        for shape in shapes:
            topology = find_topology(f"{generation}:{'x'.join(map(str, shape))}")
            assert topology.shape == shape
            assert topology.ring_links <= TPUS[generation].links


@pytest.mark.parametrize(
    ("op", "sent"),
    [("all-reduce", 150.0), ("all-gather", 75.0), ("reduce-scatter", 75.0), ("collective-permute", 100.0)],
)
def test_bytes_that_a_device_sends(op: str, sent: float) -> None:
    assert wire_bytes(op, 100.0, 4) == sent
    assert wire_bytes(op, 100.0, 1) == 0


def test_gpus_are_known_by_the_names_that_jax_has_for_them() -> None:
    assert find_gpu("NVIDIA H200") == GPUS["NVIDIA H200"]
    assert find_gpu("NVIDIA A100-SXM4-80GB").bandwidth == 2039e9  # type: ignore[union-attr]
    assert find_gpu("NVIDIA GeForce GTX 970") is None
