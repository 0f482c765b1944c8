"""`tianji compile` as a user meets it, and what it says against what is known otherwise."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import jax
import pytest

from tianji_jax import compilation
from tianji_jax.agents.ppo import PPO
from tianji_jax.cli import main
from tianji_jax.compilation import _acting, measure
from tianji_jax.config import load
from tianji_jax.environments import make_spec
from tianji_jax.learner import UPDATES_HELD, init_state
from tianji_jax.testing import TrivialAgent

CONFIGS = Path(__file__).parents[1] / "configs"
IMPALA, MEMORY, DQN = (str(CONFIGS / f"{name}.yaml") for name in ("cartpole_impala", "memory_ppo", "cartpole_dqn"))
DEVICES = f"learner.devices={min(4, jax.device_count('cpu'))}"
ON_CPU = ["learner.platform=cpu", DEVICES]


def compiled(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["compile", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["compile", *arguments]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


def test_memory_is_that_of_the_arrays() -> None:
    config = load(MEMORY, [*ON_CPU, "learner.queue_capacity=3"])
    memory = measure(config, None)["memory"]
    agent = PPO(
        PPO.Config(learning_rate=1e-3, entropy_coefficient=0.01, network={"recurrence": "gru", "recurrent_size": 64}),
        make_spec(config.environment.name, config.environment.options),
    )
    state = jax.eval_shape(lambda: init_state(agent, 0))
    params = sum(x.size * 4 for x in jax.tree.leaves(state.train_state.params))
    assert memory["parameters"] == params
    # Adam's two moments and step count; the random key, version and count of bad updates.
    assert memory["optimiser"] == 2 * params + 4 + 8 + 4 + 4
    assert memory["checkpoint"] == memory["parameters"] + memory["optimiser"]
    # 33 observations of 5 float32, 33 flags; 32 actions, rewards, log-probabilities and three flags of 8 environments;
    # their recurrent state and versions. Without what a value function does not look at.
    batch = memory["queue"] / 3
    assert batch <= 8 * (33 * (5 * 4 + 1) + 32 * (3 * 4 + 3) + 64 * 4 + 4)
    assert batch >= 8 * (33 * (5 * 4 + 1) + 32 * (3 * 4 + 2) + 64 * 4)
    assert memory["in_flight"] == (1 + UPDATES_HELD) * batch
    parts = {name: size for name, size in memory.items() if name not in ("sum", "available")}
    assert memory["sum"] == sum(parts.values())


def test_what_the_command_says_of_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr(compilation, "measure", lambda *given: found.update(measure(*given)) or found)
    overrides = ["actors.environments=32", "actors.unroll_length=16", "learner.trajectories_per_update=2"]
    assert main(["compile", IMPALA, *ON_CPU, *overrides]) == 0
    text = capsys.readouterr().out
    assert "impala on envpool:CartPole-v1\nCPU: 4 devices on 1 host\n" in text
    assert "1,024 environment steps" in text
    assert found["steps_per_update"] == 2 * 32 * 16
    # Each gradient is reduced once, with little else.
    params = found["memory"]["parameters"]
    assert 0.95 * params < found["collective_bytes"] < 1.1 * params
    # Two hidden layers of 64 for policy and value, three products each forwards and backwards for 17 x 16 observations;
    # the first layer's inputs need no gradient.
    inner, first, last = 2 * 64 * 64, 2 * 4 * 64, 64 * (2 + 1)
    assert found["flops"] == pytest.approx(17 * 16 * 2 * (3 * inner + 2 * first + 3 * last), rel=0.03)


def test_an_update_of_several_passes_counts_each(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["agent.epochs=3", "agent.minibatches=2", "actors.environments=32", "actors.unroll_length=16"]
    found = compiled(capsys, str(CONFIGS / "cartpole_ppo.yaml"), *ON_CPU, *overrides)
    params = found["memory"]["parameters"]
    assert 3 * 2 * params < found["collective_bytes"] < 1.1 * 3 * 2 * params
    # As above, with a pass over all 16 x 8 steps in each epoch; and once forwards over 17 x 8 to begin with.
    inner, first, last = 2 * 64 * 64, 2 * 4 * 64, 64 * (2 + 1)
    passes = 3 * 16 * 8 * (3 * inner + 2 * first + 3 * last)
    forwards = 17 * 8 * (inner + first + last)
    assert passes < found["flops"] / 2 < 1.1 * (passes + forwards)


@pytest.mark.parametrize("name", ["v5e:3x3", "v7:2x2", "v5e", "tpu", ""])
def test_unknown_topologies_are_answered_with_the_known(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, IMPALA, "--topology", name)
    assert f"unknown topology {name!r}" in message
    assert "v5e:1x1 v5e:2x2" in message
    assert "gpu" in message


def test_bad_input_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'count'" in refused(capsys, IMPALA, "actors.cout=2")
    message = refused(capsys, IMPALA, *ON_CPU, "actors.environments=6", "learner.trajectories_per_update=3")
    assert "18 environments cannot be divided among 4 devices" in message
    assert "learner.trajectories_per_update=4" in message
    assert "learns from replay" in refused(capsys, DQN, "learner.platform=cpu")
    if jax.default_backend() == "cpu":
        assert "learner.platform: gpu asked for" in refused(capsys, IMPALA, "--topology", "gpu")


def test_without_libtpu_the_extra_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libtpu" else find(name))
    assert "pip install 'tianji_jax[tpu]'" in refused(capsys, IMPALA, "--topology", "v5e:2x2")


def test_the_parameters_are_what_actors_get() -> None:
    agent = TrivialAgent(TrivialAgent.Config(), make_spec("envpool:CartPole-v1", {}))
    state = jax.eval_shape(agent.init, jax.random.key(0))
    acting = [jax.tree.leaves(state)[index] for index in _acting(agent, state)]
    assert jax.tree.leaves(jax.eval_shape(agent.actor_params, state)) == acting


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: its 700 MB are for those who compile for TPUs, tianji_jax[tpu]",
)


@needs_libtpu
@pytest.mark.parametrize(("topology", "hosts", "devices"), [("v5e:4x4", 4, 16), ("v4:2x2x1", 1, 4), ("v6e:1x1", 1, 1)])
def test_a_slice_that_is_not_there_is_compiled_for(
    topology: str, hosts: int, devices: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", IMPALA, "--topology", topology, "--json", "actors.environments=32"]) == 0
    captured = capfd.readouterr()
    assert not captured.err
    found = json.loads(captured.out)
    assert (found["hosts"], found["devices"]) == (hosts, devices)
    assert found["steps_per_update"] == hosts * 32 * 16
    assert found["fits"]
    assert found["limited_by"] in ("compute", "memory", "interconnect")
    # Arrays are padded to tiles of 8 x 128.
    assert found["memory"]["parameters"] > 2 * 18_000 * 4 / 2
    assert found["collective_bytes"] > 18_000 * 4 or devices == 1


@needs_libtpu
def test_a_pod_refuses_what_it_cannot_run(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["compile", IMPALA, "--topology", "v5e:4x4"]
    assert main([*arguments, "actors.environments=2"]) == 2
    assert "learner.trajectories_per_update=2" in capfd.readouterr().err
    assert main([*arguments, "balance.max_reuse=1"]) == 2
    assert "balance.max_reuse=0" in capfd.readouterr().err
    assert main([*arguments, "actors.environments=16_777_216", "actors.unroll_length=128"]) == 1
    assert "does not fit" in capfd.readouterr().err
