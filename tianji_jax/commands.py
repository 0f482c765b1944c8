"""What each command of `tianji` does; `cli` reads the command line.

What a command needs is imported when it runs, so that --help and spelling mistakes are answered at once. Each returns
an exit code.
"""

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tianji_jax.config import Config

REFUSED = 2
FAILED = 1


def train(options: argparse.Namespace) -> int:
    """Train; with `--resume` go on."""
    from tianji_jax.checkpoint import CheckpointError
    from tianji_jax.launch import train
    from tianji_jax.worker import WorkerError

    config = configured(options)
    try:
        result = train(config, resume=options.resume, profile=options.profile)
    except WorkerError as error:
        return _failed(error)
    except CheckpointError as error:
        print(f"tianji: {error}", file=sys.stderr)
        return FAILED
    outcome = "no episode finished" if result.episode_return is None else f"return {result.episode_return:,.1f}"
    print(
        f"{'solved: ' if result.solved else ''}{outcome} after {result.environment_steps:,} environment steps and "
        f"{result.seconds:.1f} s{' of this process' if options.resume else ''}; {result.path}"
    )
    return 0


def configured(options: argparse.Namespace) -> "Config":
    """The configuration that `train` and `learner` are told."""
    from tianji_jax.config import ConfigError, load

    if options.resume is not None and options.config is not None and "=" in options.config:
        options.config, options.overrides = None, [options.config, *options.overrides]
    overrides = list(options.overrides)
    if options.config is None and options.resume is None:
        raise ConfigError("train what? Name a configuration (tianji train configs/x.yaml) or a run (--resume runs/x)")
    if options.resume is None:
        return load(options.config, overrides)
    return _resumed(options.resume, options.config, overrides)


def learner(options: argparse.Namespace) -> int:
    """Keep one of several learners."""
    from tianji_jax.keeper import Child, Keeper, find_place

    config, place = configured(options), find_place(options.coordinator, options.process)
    arguments = [*([options.config] if options.config else []), *options.overrides]
    arguments += ["--resume", str(options.resume)] if options.resume else []
    arguments += ["--profile", str(options.profile)] if options.profile else []
    return Keeper(place, config, lambda: Child(place, arguments)).run()


def _resumed(run: Path, path: str | None, overrides: Sequence[str]) -> "Config":
    """The configuration to go on with; shows where it differs from the run's."""
    from tianji_jax.config import ConfigError, difference, load
    from tianji_jax.run_folder import CONFIG

    if not (run / CONFIG).is_file():
        if path is not None:  # of several learners only learner 0 needs the run, and says so where it is missing
            return load(path, overrides)
        raise ConfigError(f"--resume {run}: no run there ({CONFIG} is missing)")
    before = load(run / CONFIG)
    agent = before.agent["name"]
    others = [override for override in overrides if override.startswith("agent.name=")]
    if others and others[-1] != f"agent.name={agent}":
        raise ConfigError(f"{others[-1]}: this run's agent is {agent}, which no other can go on from: start a new run")
    config = load(path or run / CONFIG, overrides)
    for setting, old, new in difference(before, config):
        print(f"changed: {setting}: {old!r} -> {new!r}")
    return config


def _failed(error: Exception) -> int:
    from tianji_jax.config import ConfigError
    from tianji_jax.transport import GroupsRefused

    if isinstance(error.__cause__, ConfigError | GroupsRefused):  # the user's to mend: the message says how
        print(f"tianji: {error.__cause__}", file=sys.stderr)
        return FAILED
    traceback.print_exception(error.__cause__ or error)
    # The rest is in the traceback.
    print(f"tianji: {str(error).splitlines()[0]}", file=sys.stderr)
    return FAILED


def watch(options: argparse.Namespace) -> int:
    """Show how a run stands."""
    from tianji_jax.watch import watch

    print(watch(options.run))
    return 0


def root(options: argparse.Namespace) -> int:
    """Fuse what groups of runs learn."""
    from tianji_jax.config import load
    from tianji_jax.root import serve
    from tianji_jax.worker import WorkerError

    try:
        together = serve(load(options.config, options.overrides), lambda line: print(line, flush=True))
    except WorkerError as error:
        return _failed(error)
    print(
        f"{'solved: ' if together.solved else ''}all groups have ended after {together.environment_steps:,} "
        f"environment steps and {together.outer_steps:,} changes fused"
    )
    return 0


def actor(options: argparse.Namespace) -> int:
    """Act for a learner elsewhere."""
    from tianji_jax.config import load
    from tianji_jax.remote_actor import act
    from tianji_jax.worker import WorkerError

    try:
        act(load(options.config, options.overrides), options.connect, options.count, options.id)
    except WorkerError as error:
        return _failed(error)
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """Play a saved policy."""
    from rich.console import Console

    from tianji_jax.evaluation import play, table
    from tianji_jax.saved_policy import load_policy
    from tianji_jax.video import film

    policy = load_policy(options.run, best=options.best)
    modes = ([False, True] if policy.can_be_greedy else [False]) if options.greedy is None else [options.greedy]
    if options.video is not None:
        frames = film(policy, options.video, modes[-1], options.seed)
        print(f"wrote {options.video}: an episode {'greedy' if modes[-1] else 'sampled'}, {frames:,} frames")
    found = [play(policy, options.episodes, greedy, options.seed) for greedy in modes]
    console = Console()
    console.print(table(found))
    if not policy.can_be_greedy:
        console.print("sampled only: the agent has no act_greedy")
    return 0


def export(options: argparse.Namespace) -> int:
    """Write a policy for use without tianji_jax."""
    from tianji_jax.export import EXAMPLE, export

    folder = export(options.run, options.output, best=options.best, greedy=options.greedy, batch=options.batch)
    print(f"wrote {folder}; try it: python {folder / EXAMPLE}")
    return 0


def plot(options: argparse.Namespace) -> int:
    """Draw the reports of runs."""
    from tianji_jax.curves import plot
    from tianji_jax.records import gather

    plot(gather(options.runs, options.label), options.output, options.x, options.title, options.goal)
    print(f"wrote {options.output}")
    return 0


def compare(options: argparse.Namespace) -> int:
    """Print when runs reached a return."""
    from rich.console import Console

    from tianji_jax.comparison import compare
    from tianji_jax.records import gather

    compare(gather(options.runs, options.label), options.goal, Console())
    return 0


def config(options: argparse.Namespace) -> int:
    """Print a configuration with every default."""
    from tianji_jax.blueprint import plan
    from tianji_jax.config import load, to_yaml

    config = load(options.config, options.overrides)
    plan(config)
    print(to_yaml(config), end="")
    return 0


def keys(options: argparse.Namespace) -> int:
    """Write keys."""
    from tianji_jax.transport import KeyFileError, make_keys

    directory = Path(options.directory)
    try:
        files = make_keys(directory, options.actor)
    except KeyFileError as error:
        print(f"tianji: {error}", file=sys.stderr)
        return REFUSED
    actor = files[-1].stem
    print("\n".join(f"wrote {file}" for file in files))
    print(
        f"the learner's host keeps {directory} (learner.key_secret and every actor's NAME.key)\n"
        f"an actor's host gets learner.key and {actor}.key_secret, in a folder for its user only (chmod 700)\n"
        "both name their folder in security.keys; a learner that runs lets a new actor in once its NAME.key is there"
    )
    return 0


def environments(options: argparse.Namespace) -> int:
    """List the names of environments."""
    from tianji_jax.environments import names

    found = names(options.word)
    print("\n".join(found) if found else f"no environment has {options.word!r} in its name")
    return 0 if found else FAILED
