"""What cannot run is refused before anything starts, in words that say what to do."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest

from tianji_jax.agent import AgentConfig
from tianji_jax.blueprint import plan
from tianji_jax.config import ConfigError, apply_override, load, to_yaml, validate
from tianji_jax.launch import train
from tianji_jax.parallel import Parallel
from tianji_jax.run import Run
from tianji_jax.testing import TrivialAgent

MINIMAL: dict[str, Any] = {"environment": {"name": "envpool:CartPole-v1"}, "agent": {"name": "ppo"}}
CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


class DataclassAgent(TrivialAgent):
    """An agent whose settings are a plain dataclass."""

    @dataclasses.dataclass(frozen=True)
    class Config:  # type: ignore[assignment]
        learning_rate: float = 0.5
        memory: bool = False


def resolve(tree: dict[str, Any], *overrides: str) -> None:
    tree = {section: dict(settings) for section, settings in tree.items()}
    for override in overrides:
        apply_override(tree, override)
    plan(validate(tree))


def refusal(*overrides: str, tree: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(tree or MINIMAL, *overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actors.cout=2", ["actors.cout", "did you mean 'count'"]),
        ("actor.count=2", ["actor", "did you mean 'actors'"]),
        ("agent.learning_rte=1", ["agent.learning_rte", "did you mean 'learning_rate'"]),
        ("agent.network.torsso=mlp", ["agent.network.torsso", "did you mean 'torso'"]),
        ("actors.count=zero", ["actors.count", "'zero'", "integer"]),
        ("actors.count=-1", ["actors.count", "-1", "greater than or equal to 0"]),
        ("actors.count=0", ["actors.count is 0", "actors.listen=tcp://HOST:PORT", "1 or more"]),
        ("agent.learning_rate=-1", ["agent.learning_rate", "-1", "greater than 0"]),
        ("learner.parallel=pmpa", ["learner.parallel", "'pmap'", "'shard_map'"]),
        ("staleness.fresh_lag=3", ["fresh_lag (3)", "max_lag (1)"]),
        ("actors.device=gpu", ["actors.device: got 'gpu'; it should be 'cpu' or 'accelerator'"]),
        ("agent.name=pop", ["agent.name", "'pop'", "did you mean 'ppo'", "module:Class"]),
        ("agent.name=nowhere.at.all:Agent", ["agent.name", "no module 'nowhere.at.all'"]),
        ("agent.name=./my_agent:Agent", ["agent.name: unknown agent './my_agent:Agent'", "module:Class"]),
        ("agent.name=:Agent", ["agent.name: unknown agent ':Agent'", "module:Class"]),
        ("agent.name=[ppo]", ["agent.name"]),
        ("run.name=2025-31-12", ["override 'run.name=2025-31-12'"]),
        ("agent.optimizer=lbfgs", ["agent.optimizer 'lbfgs' is not an optimiser"]),
        ("agent.name=tianji_jax.testing:TrivialAgnt", ["agent.name", "did you mean 'TrivialAgent'"]),
        ("agent.name=tianji_jax.testing:CountingEnv", ["agent.name", "is no agent", "update"]),
        ("agent.optimizer=adm", ["agent.optimizer", "did you mean 'adam'"]),
        ("environment.name=CartPole-v1", ["envpool:CartPole-v1"]),
        ("environment.name=envpool:CartPol-v1", ["CartPole-v1"]),
        ("environment.options.max_episode_step=3", ["max_episode_steps"]),
        ("agent.network.torso=nature_cnn", ["agent.network.torso", "images"]),
        ("run.environment_steps=.inf", ["run.environment_steps"]),
    ],
)
def test_a_mistake_is_answered_with_the_setting_the_value_and_what_is_allowed(override: str, words: list[str]) -> None:
    message = refusal(override)
    assert all(word in message for word in words), message


def test_reuse_and_lock_step_exclude_each_other() -> None:
    message = refusal("run.deterministic=true", "balance.max_reuse=1")
    assert "balance.max_reuse" in message
    assert "run.deterministic" in message


def test_every_problem_is_told_at_once() -> None:
    assert refusal("actors.cout=2", "staleness.max_lag=-1", "learner.devices=0").count("\n") == 2


def test_a_discrete_agent_refuses_continuous_actions() -> None:
    tree = {"environment": {"name": "envpool:Pendulum-v1"}, "agent": {"name": "tianji_jax.testing:TrivialAgent"}}
    assert "discrete actions only" in refusal(tree=tree)


def test_environments_are_halved_where_the_policy_has_a_device_of_its_own() -> None:
    accelerator, on, off = {"device": "accelerator"}, {"double_buffered": True}, {"double_buffered": False}
    for settings, buffered in (({}, False), (accelerator, True), (on, True), (accelerator | off, False)):
        assert validate({**MINIMAL, "actors": settings}).actors.double_buffered == buffered
    assert validate({**MINIMAL, "actors": {"environments": 7}}).actors.environments == 7
    words = refusal(tree={**MINIMAL, "actors": {"environments": 7} | accelerator})
    assert "actors.environments is 7" in words
    assert "double_buffered=false" in words


def test_missing_sections_are_named() -> None:
    assert "environment: missing" in refusal(tree={"agent": {"name": "ppo"}})
    assert "agent.name is missing" in refusal(tree={**MINIMAL, "agent": {}})


def test_a_batch_that_cannot_be_divided_says_what_would_fit() -> None:
    config = validate({**MINIMAL, "actors": {"environments": 6}})
    with pytest.raises(ConfigError, match=r"6 environments cannot be divided among 4 devices: .* multiple of 4"):
        Run(plan(config), Parallel(jax.devices()[:4], "pmap"))


def test_a_batch_the_agent_cannot_cut_is_refused_before_anything_starts(tmp_path: Path) -> None:
    tree = {**MINIMAL, "agent": {"name": "ppo", "minibatches": 3}, "run": {"directory": str(tmp_path / "runs")}}
    tree["learner"] = {"devices": 1}
    with pytest.raises(ConfigError, match=r"agent.minibatches 3 does not divide the 2048 steps"):
        train(tree)
    assert not (tmp_path / "runs").exists()


def test_overrides_are_yaml_and_numbers_like_1e_3_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("environment: {name: 'envpool:CartPole-v1'}\nagent: {name: ppo, learning_rate: 1e-4}\n")
    config = load(path, ["run.seed=2", "agent.network.hidden_sizes=[8, 8]", "environment.options.x=2.5e-1"])
    assert config.agent["learning_rate"] == 1e-4
    assert config.run.seed == 2
    assert config.agent["network"]["hidden_sizes"] == [8, 8]
    assert config.environment.options == {"x": 0.25}


@pytest.mark.parametrize("override", ["run.seed", "=3", "run.=3", "run.seed.deeper=3", "run.seed=[1"])
def test_an_override_that_is_none_is_refused(tmp_path: Path, override: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("environment: {name: 'envpool:CartPole-v1'}\nagent: {name: ppo}\nrun: {seed: 1}\n")
    with pytest.raises(ConfigError, match="override"):
        load(path, [override])


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none.yaml: No such file"):
        load(tmp_path / "none.yaml")
    bad = tmp_path / "bad.yaml"
    for text in ("a: [", "- a list", "\x00"):
        bad.write_text(text)
        with pytest.raises(ConfigError, match=r"bad.yaml"):
            load(bad)


def test_a_printed_configuration_loads_again_as_the_same(tmp_path: Path) -> None:
    config = validate(MINIMAL)
    path = tmp_path / "a.yaml"
    path.write_text(to_yaml(config))
    assert load(path) == config


def test_an_agents_settings_may_be_a_dataclass() -> None:
    tree = {**MINIMAL, "agent": {"name": f"{__name__}:DataclassAgent", "memory": True}}
    assert validate(tree).agent == {"name": f"{__name__}:DataclassAgent", "learning_rate": 0.5, "memory": True}
    assert "did you mean 'memory'" in refusal("agent.memry=1", tree=tree)
    assert issubclass(TrivialAgent.Config, AgentConfig)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_configuration_is_valid(path: Path) -> None:
    blueprint = plan(load(path))
    agent = blueprint.config.agent["name"]
    assert path.stem.endswith(f"_{agent}")
    assert f"tianji train configs/{path.name}" in path.read_text()


def test_names_that_are_no_folders_are_refused_and_an_empty_one_is_none() -> None:
    for name in (".", ".."):
        with pytest.raises(ConfigError, match=r"run\.name: got '\.+', which is no name of a folder"):
            validate({**MINIMAL, "run": {"name": name}})
    tree: dict[str, Any] = {}
    apply_override(tree, "run.name=")
    assert validate({**MINIMAL, **tree}).run.name == ""
