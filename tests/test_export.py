"""An exported policy does elsewhere what the agent does here, with nothing of this package in reach."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import tianji_jax
from short_runs import cartpole_config, counting_config
from tianji_jax.cli import main
from tianji_jax.config import Config, ConfigError
from tianji_jax.environments import make
from tianji_jax.export import PLATFORMS, export
from tianji_jax.saved_policy import load_policy
from tianji_jax.testing import TrivialAgent
from tianji_jax.types import PyTree

WITHOUT_US = """
import runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tianji_jax", "agents", "flax"):
            raise ImportError(f"{name} is not to be had here")
sys.meta_path.insert(0, Refuse())
"""

PLAY = """
import numpy as np
example = runpy.run_path(sys.argv[1])
policy, given = example["policy"], dict(np.load(sys.argv[2]))
state = tuple(given[f"state_{i}"] for i in range(len(example["state"])))
actions = []
for t, observation in enumerate(given["observation"]):
    action, state = policy(given["key"][t], observation, given["is_first"][t], state)
    actions.append(action)
np.savez(sys.argv[3], actions=np.stack(actions), **{f"state_{i}": x for i, x in enumerate(state)})
"""


def played(run: Path, greedy: bool, steps: int, count: int) -> dict[str, Any]:
    """Steps of the agent itself in the run's environment: what it saw, what it did, its state before and after."""
    policy = load_policy(run)
    agent: Any = policy.agent
    name, options = policy.config.environment.name, policy.config.environment.options
    environments = make(name, options, num_environments=count, seed=5, threads=1)
    step, state = environments.reset(), agent.initial_state(count)
    told: dict[str, Any] = {"observation": [], "is_first": [], "key": [], "actions": [], "before": leaves(state)}
    for t in range(steps):
        key = jax.random.key(t)
        if greedy:
            action, state = jax.jit(agent.act_greedy)(policy.params, step.observation, step.is_first, state)
        else:
            action, _, state = jax.jit(agent.act)(policy.params, key, step.observation, step.is_first, state)
        for what, value in (("observation", step.observation), ("is_first", step.is_first), ("actions", action)):
            told[what].append(np.asarray(value))
        told["key"].append(np.asarray(jax.random.key_data(key)))
        step = environments.step(np.asarray(action))
    environments.close()
    return {**told, "after": leaves(state)}


def leaves(state: PyTree) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(state)]


def python(code: str, *arguments: Path) -> str:
    """Run code in a fresh process where this package cannot be imported; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_US + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


MEMORY: dict[str, Any] = {"agent": {"name": "tianji_jax.testing:TrivialAgent", "memory": True}}
GRU = {"agent": {"name": "ppo", "minibatches": 1, "network": {"recurrence": "gru", "recurrent_size": 8}}}
LSTM = {"agent": {"name": "ppo", "minibatches": 1, "network": {"recurrence": "lstm", "recurrent_size": 8}}}
PENDULUM = {
    "environment": {"name": "envpool:Pendulum-v1"},
    "agent": {"name": "ppo", "normalise_observations": True, "squash": True},
}


@pytest.mark.parametrize(
    ("settings", "greedy"),
    [
        pytest.param({}, True, id="greedy"),
        pytest.param(GRU, True, id="gru-greedy"),
        pytest.param(PENDULUM, False, id="box-sampled", marks=pytest.mark.slow),
        pytest.param({}, False, id="sampled", marks=pytest.mark.slow),
        pytest.param(LSTM, False, id="lstm-sampled", marks=pytest.mark.slow),
        pytest.param(PENDULUM, True, id="box-greedy"),
    ],
)
def test_what_is_exported_acts_like_the_agent(tmp_path: Path, settings: dict[str, Any], greedy: bool) -> None:
    run = tianji_jax.train(cartpole_config(tmp_path, settings), show=False).path
    folder = export(run, greedy=greedy)
    assert folder.parent == run
    # More steps than an untrained policy keeps its pole up: states are reset on the way.
    expected = played(run, greedy, steps=40, count=3)
    assert settings is PENDULUM or np.stack(expected["is_first"])[1:].any()
    given = {f"state_{i}": x for i, x in enumerate(expected["before"])}
    given |= {name: np.stack(expected[name]) for name in ("observation", "is_first", "key")}
    np.savez(tmp_path / "given.npz", **given)
    python(PLAY, folder / "example.py", tmp_path / "given.npz", tmp_path / "done.npz")
    with np.load(tmp_path / "done.npz") as done:
        actions = np.stack(expected["actions"])
        np.testing.assert_allclose(done["actions"], actions, atol=1e-6 if actions.dtype.kind == "f" else 0)
        for i, x in enumerate(expected["after"]):
            np.testing.assert_allclose(done[f"state_{i}"], x, atol=1e-6)


def test_the_example_runs_alone_also_from_a_fixed_batch(tmp_path: Path) -> None:
    run = tianji_jax.train(counting_config(tmp_path, MEMORY), show=False).path
    assert main(["export", str(run), "--batch", "3", "--output", str(tmp_path / "out" / "policy")]) == 0
    output = python("runpy.run_path(sys.argv[1])", tmp_path / "out" / "policy" / "example.py")
    assert output.startswith("[")
    assert len(output.split()) == 3
    imports = {
        line for line in (tmp_path / "out" / "policy" / "example.py").read_text().splitlines() if "import" in line
    }
    assert imports == {"from pathlib import Path", "import jax", "import numpy as np", "from jax import export"}
    exported = jax.export.deserialize(bytearray((tmp_path / "out" / "policy" / "policy.jax").read_bytes()))
    assert exported.platforms == PLATFORMS
    assert exported.in_avals[1].shape == (3, 2)


class Counts(TrivialAgent):
    """Looks at the number of its environments, as a number: not for all batch sizes at once."""

    def act(self, params: PyTree, rng: Any, observation: PyTree, is_first: Any, state: PyTree) -> Any:
        if len(is_first) not in range(100):
            raise ValueError("too many")
        return super().act(params, rng, observation, is_first, state)


def test_what_works_for_one_batch_size_only_is_refused_for_all(tmp_path: Path) -> None:
    config: Config = counting_config(tmp_path, {"agent": {"name": f"{__name__}:Counts"}})
    run = tianji_jax.train(config, show=False).path
    with pytest.raises(ConfigError, match=r"Counts cannot be exported; --batch N writes it for one batch size: "):
        export(run)
    assert not list(run.glob("policy-*"))
    assert (export(run, batch=2) / "example.py").is_file()


def test_bad_input_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tianji_jax.train(counting_config(tmp_path), show=False).path
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "example.py").write_text("mine")
    for arguments, words in (
        ([str(tmp_path / "nowhere")], "is no run"),
        ([str(run), "--greedy"], "can only be sampled"),
        ([str(run), "--best"], "no checkpoint with a mean return of 100 episodes"),
        ([str(run), "--batch", "0"], "--batch: got 0"),
        ([str(run), "--output", str(taken)], "exists already"),
        ([str(run), "--output", str(taken / "example.py" / "x")], "cannot write"),
    ):
        assert main(["export", *arguments]) == 2
        errors = capsys.readouterr().err
        assert words in errors
        assert len(errors.splitlines()) == 1
    assert (taken / "example.py").read_text() == "mine"
