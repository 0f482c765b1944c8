"""Typed configuration: a YAML file, dotted overrides, and messages that say what to do.

Every setting is a field below with its default, its range and its meaning; `tianji config FILE` prints them resolved.
Settings of the agent are validated by the agent's own `Config`.
"""

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from tianji_jax.explain import explain, fields, nearest
from tianji_jax.groups_config import GroupsConfig
from tianji_jax.replay_config import ReplayConfig

AGENTS = {
    "ppo": "tianji_jax.agents.ppo:PPO",
    "impala": "tianji_jax.agents.impala:IMPALA",
    "dqn": "tianji_jax.agents.dqn:DQN",
    "r2d2": "tianji_jax.agents.r2d2:R2D2",
    "sac": "tianji_jax.agents.sac:SAC",
    "td3": "tianji_jax.agents.td3:TD3",
    "ddpg": "tianji_jax.agents.td3:DDPG",
}
"""Short names for the agents that ship with the package; any other is `module:Class`."""


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the setting, what was given and what is allowed."""


class Section(BaseModel):
    """Base of all sections: no unknown keys, no changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RunConfig(Section):
    """The run as a whole."""

    directory: Path = Field(Path("runs"), description="folder that holds the runs")
    name: str = Field(
        "",
        pattern=r"^[\w.+-]*$",
        description="folder of this run; empty: environment_agent, numbered where there is one",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="seeds parameters, policies and environments")
    environment_steps: int = Field(1_000_000, ge=1, description="end after so many environment steps")
    stop_at_return: float | None = Field(
        None, description="end when the mean return of the last 100 episodes reaches this"
    )
    deterministic: bool = Field(False, description="lock-step: consume in (sequence, actor) order; repeats bit for bit")
    report_every_seconds: float = Field(1.0, gt=0, description="seconds between two reports")
    compilation_cache: Path | None = Field(
        Path("~/.cache/tianji_jax/xla"),
        description="folder where compiled programs are kept between runs; null: none",
    )

    @field_validator("name")
    @classmethod
    def _folder_name(cls, name: str) -> str:
        if name and not name.strip("."):
            raise ValueError(f"got {name!r}, which is no name of a folder to make")
        return name


class EnvironmentConfig(Section):
    """What is played."""

    name: str = Field(description="envpool:TASK, gymnasium:TASK, or module:Class of a gymnasium.Env")
    options: dict[str, Any] = Field(default_factory=dict, description="passed to the environment")


class ActorsConfig(Section):
    """Who plays."""

    count: int = Field(
        1, ge=0, le=65_536, description="actors that the learner starts; 0, where actors.listen is set: none"
    )
    environments: int = Field(64, ge=1, description="environments of each actor (B)")
    unroll_length: int = Field(32, ge=1, description="environment steps in a trajectory (T)")
    placement: Literal["thread", "process"] = Field(
        "thread", description="threads of the learner's process, or processes on this host"
    )
    device: Literal["cpu", "accelerator"] = Field(
        "cpu", description="where the policy runs: the host's CPU or the learner's kind of device"
    )
    double_buffered: bool = Field(
        default_factory=lambda given: given.get("device") == "accelerator",
        description="half of them step while the policy acts for the rest; left out: true if device is accelerator",
    )
    environment_threads: int = Field(
        0, ge=0, description="threads of each environment pool; 0: share the cores among the pools"
    )
    parameters: Literal["float32", "bfloat16"] = Field(
        "float32", description="how parameters travel to the actors; bfloat16 rounds them, in half the bytes"
    )
    listen: str | None = Field(
        None,
        description="tcp://HOST:PORT where actors from elsewhere connect (PORT + 1 is used too); null: local ones only",
    )
    # A crash loop ends the run after some five minutes; rare crashes never do, nor does a minute of many.
    max_restarts: int = Field(
        20,
        ge=0,
        description="start an actor process that was killed again so often, with growing pauses, before the run ends; "
        "the count begins anew once it has lived for a minute",
    )
    hang_seconds: float = Field(
        5.0,
        gt=0,
        description="an actor that takes longer for a trajectory, and four times as long as it ever took, hangs: what "
        "it was granted goes to the others (60 seconds for its first trajectory, for which it compiles)",
    )
    wait_seconds: float = Field(
        600.0,
        gt=0,
        description="end the run when no actor has been heard of for so long; an actor is silent while it acts, so it "
        "must be longer than an unroll",
    )

    @field_validator("listen")
    @classmethod
    def _address(cls, listen: str | None) -> str | None:
        match = listen and re.fullmatch(r"tcp://[^\s/]+:(\d{1,5})", listen)
        if listen is not None and not (match and 1 <= int(match[1]) <= 65_534):
            raise ValueError(f"got {listen!r}; it should be tcp://HOST:PORT with a PORT from 1 to 65534")
        return listen


class StalenessConfig(Section):
    """How old a trajectory may be, in policy versions."""

    fresh_lag: int = Field(0, ge=0, description="up to this lag a trajectory counts as on-policy")
    max_lag: int = Field(1, ge=0, description="beyond this lag a trajectory is dropped; 0: strictly on-policy")
    correct: bool = Field(True, description="between fresh_lag and max_lag the loss corrects by importance weights")

    @model_validator(mode="after")
    def _ordered(self) -> "StalenessConfig":
        if self.fresh_lag > self.max_lag:
            raise ValueError(f"fresh_lag ({self.fresh_lag}) must not exceed max_lag ({self.max_lag})")
        return self


class BalanceConfig(Section):
    """What a learner does that would starve."""

    max_reuse: int = Field(0, ge=0, description="further updates on a batch while none is waiting")
    min_ess: float = Field(
        0.5,
        ge=0,
        le=1,
        description="no further pass once the effective sample size falls below this fraction",
    )


class LearnerConfig(Section):
    """The sharded update."""

    trajectories_per_update: int = Field(1, ge=1, description="trajectories in a batch (N)")
    devices: int | None = Field(None, ge=1, description="devices to use; null: all of this host")
    platform: Literal["auto", "cpu", "gpu", "tpu"] = Field(
        "auto", description="kind of device; auto: the best there is"
    )
    parallel: Literal["pmap", "shard_map"] = Field("pmap", description="how the update is spread over the devices")
    queue_capacity: int = Field(2, ge=1, le=64, description="batches held ready on the devices")
    max_bad_updates: int = Field(
        10, ge=1, description="end the run after so many non-finite updates in a row (each is skipped)"
    )
    gather_seconds: float = Field(
        300.0, gt=0, description="of several learners (`tianji learner`): until all have to be there"
    )
    silence_seconds: float = Field(
        30.0, ge=5, description="of several learners: all end when one has not been heard of for so long"
    )


class CheckpointConfig(Section):
    """What is saved of a run, and when; a run always saves when it ends or is stopped."""

    every_seconds: float | None = Field(300.0, gt=0, description="save so often; null: never by the clock")
    every_learner_steps: int | None = Field(
        None, ge=1, description="save after so many updates; null: never by updates"
    )
    keep: int = Field(3, ge=1, description="latest checkpoints that stay")
    keep_best: bool = Field(True, description="beside them the one with the highest mean return of 100 episodes stays")


class MetricsConfig(Section):
    """Where reports go beside metrics.jsonl."""

    tensorboard: bool = Field(True, description="write event files for TensorBoard into the run's folder")
    wandb_project: str | None = Field(
        None, description="project of Weights & Biases (WANDB_MODE=offline keeps it on this machine); null: none"
    )


class SecurityConfig(Section):
    """Who may connect from other hosts. On loopback and between processes of one user nothing is needed."""

    keys: Path | None = Field(
        None, description="folder with keys made by `tianji keys new`, for the learner and for its actors; null: none"
    )
    allow_plaintext: bool = Field(
        False, description="do without keys beyond this host: anybody in the network can read along and take part"
    )


class Config(Section):
    """A whole configuration."""

    run: RunConfig = RunConfig()
    environment: EnvironmentConfig
    actors: ActorsConfig = ActorsConfig()
    staleness: StalenessConfig = StalenessConfig()
    balance: BalanceConfig = BalanceConfig()
    replay: ReplayConfig = ReplayConfig()
    learner: LearnerConfig = LearnerConfig()
    groups: GroupsConfig = GroupsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    security: SecurityConfig = SecurityConfig()
    agent: dict[str, Any] = Field(description="name, and the agent's own settings")

    @model_validator(mode="after")
    def _fits_together(self) -> "Config":
        if self.actors.double_buffered and self.actors.environments % 2:
            raise ValueError(
                f"actors.environments is {self.actors.environments}, which cannot be halved for double buffering: "
                "use an even number or actors.double_buffered=false"
            )
        if self.actors.count == 0 and (self.actors.listen is None or self.run.deterministic):
            raise ValueError(
                "actors.count is 0, so that nobody would act: set actors.listen=tcp://HOST:PORT for actors of other "
                "hosts (not with run.deterministic, which is for the learner's own), or actors.count to 1 or more"
            )
        if self.run.deterministic and self.balance.max_reuse:
            raise ValueError(
                "balance.max_reuse reuses a batch when data comes late, which run.deterministic cannot repeat: "
                "set balance.max_reuse=0 or run.deterministic=false"
            )
        if self.run.deterministic and self.groups.root is not None:
            raise ValueError("groups.root: what other groups bring comes at any time, which run.deterministic forbids")
        if "name" not in self.agent:
            raise ValueError(f"agent.name is missing: one of {', '.join(AGENTS)}, or module:Class")
        return self

    @property
    def steps_per_update(self) -> int:
        """Environment steps in a batch, invalid ones included."""
        return self.learner.trajectories_per_update * self.actors.unroll_length * self.actors.environments


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-3` as a string; everybody who writes it means a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file and apply overrides such as `agent.learning_rate=1e-3`.

    Raises:
      ConfigError: the file cannot be read, or the result is not a valid configuration.
    """
    path = Path(path)
    try:
        tree = yaml.load(path.read_text(), _Loader)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:  # not text; a date that is none
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections (run, environment, actors, agent ...)")
    for override in overrides:
        apply_override(tree, override)
    return validate(tree)


def validate(tree: dict[str, Any]) -> Config:
    """A `Config` from nested dicts, its agent section checked and filled with the agent's defaults.

    Raises:
      ConfigError: with one line for each problem.
    """
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(error, Config))) from None
    settings = agent_settings(config)
    return config.model_copy(
        update={"agent": {"name": config.agent["name"], **_dump(agent_class(config).Config, settings)}}
    )


def agent_class(config: Config) -> type[Any]:
    """Import the class named by `agent.name`.

    Raises:
      ConfigError: there is no such module or class, or it is no agent.
    """
    name = config.agent["name"]
    target = AGENTS.get(name, name) if isinstance(name, str) else name
    if not isinstance(target, str) or not re.fullmatch(r"[\w.]*\w:\w[\w.]*", target) or target.startswith("."):
        raise ConfigError(
            f"agent.name: unknown agent {name!r}{nearest(str(name), AGENTS)}; "
            f"allowed: {', '.join(AGENTS)}, or module:Class"
        )
    cls = import_object(target, "agent.name")
    missing = [
        member
        for member in ("Config", "init", "actor_params", "initial_state", "act", "update")
        if not hasattr(cls, member) and not (member == "update" and hasattr(cls, "learn"))
    ]
    if missing:
        raise ConfigError(f"agent.name: {target} is no agent: it lacks {', '.join(missing)}")
    return cls


def agent_settings(config: Config) -> Any:
    """The agent's own settings as an instance of its `Config` (a pydantic model or a dataclass)."""
    cls = agent_class(config).Config
    given = {key: value for key, value in config.agent.items() if key != "name"}
    known = fields(cls)
    unknown = [f"agent.{key}: unknown setting{nearest(key, known)}" for key in given if key not in known]
    if unknown:
        raise ConfigError("\n".join(unknown))
    try:
        return TypeAdapter(cls).validate_python(given)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(error, cls, ("agent",)))) from None


def import_object(target: str, setting: str) -> Any:
    """Import `module:attribute`; errors name `setting`. Errors raised inside the module itself pass through."""
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise ConfigError(f"{setting}: no module {module_name!r} (is its folder on PYTHONPATH?)") from None
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(
            f"{setting}: module {module_name!r} has no {attribute!r}{nearest(attribute, dir(module))}"
        ) from None


def to_yaml(config: Config) -> str:
    """The configuration with every default, as YAML that loads again."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def difference(before: Config, after: Config) -> Iterator[tuple[str, Any, Any]]:
    """Settings whose values differ, by dotted name; the run's own name and folder are left out."""
    old, new = dict(flatten(before.model_dump(mode="json"))), dict(flatten(after.model_dump(mode="json")))
    for setting in {**old, **new}:
        if old.get(setting) != new.get(setting) and setting not in ("run.directory", "run.name"):
            yield setting, old.get(setting), new.get(setting)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of nested mappings by dotted name."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one value of nested dicts, as in `agent.learning_rate=1e-3`."""
    key, separator, text = override.partition("=")
    path = key.split(".")
    if not separator or not all(path):
        raise ConfigError(f"override {override!r} must read section.setting=value")
    try:
        # YAML reads nothing as null; who writes `run.name=` means no name.
        value = yaml.load(text, _Loader) if text else ""
    except (yaml.YAMLError, ValueError):
        raise ConfigError(f"override {override!r}: {text!r} is not valid YAML") from None
    node = tree
    for part in path[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {part} is a value, not a section")
    node[path[-1]] = value


def _dump(cls: type[Any], settings: Any) -> dict[str, Any]:
    return TypeAdapter(cls).dump_python(settings, mode="json")
