"""The command line: `tianji train`, `watch`, `eval`, `export`, `plot`, `compare`, `actor`, `config` and others."""

import argparse
import logging
import math
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tianji_jax.compile_command import add_compile
from tianji_jax.interrupts import INTERRUPTED, PREEMPTED, Preempted, interrupts
from tianji_jax.startup import collect_garbage_seldom

if TYPE_CHECKING:
    from tianji_jax.config import Config

REFUSED = 2
FAILED = 1

OVERRIDES = "section.setting=value, for example agent.learning_rate=1e-3 run.seed=2"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 1 failed, 2 refused, 130 stopped by Ctrl-C, 75 by SIGTERM."""
    options = _parse(arguments)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        with interrupts(at_once=True):
            return _run(options)
    except Preempted as error:
        print(_stopped(error.advice), file=sys.stderr)
        return PREEMPTED
    except KeyboardInterrupt as error:
        print(_stopped(str(error)), file=sys.stderr)
        return INTERRUPTED


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand before and after options; argparse by itself takes them in one place only."""
    parser = _parser()
    options, others = parser.parse_known_args(arguments)
    if others and (not hasattr(options, "overrides") or any(o.startswith("-") or "=" not in o for o in others)):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if others:
        options.overrides = [*options.overrides, *others]
    return options


def _stopped(advice: str) -> str:
    return f"stopped; {advice}" if advice else "stopped"


def command() -> None:
    """What the shell calls: `main`, and the end of the process.

    By now nothing runs and everything is on disk; to take an interpreter full of JAX apart would take most of a second.
    """
    collect_garbage_seldom()
    try:
        code = main()
    except SystemExit as error:  # argparse
        code = error.code if isinstance(error.code, int) else FAILED
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(options: argparse.Namespace) -> int:
    # Imported late, so that --help and spelling mistakes are answered at once.
    from tianji_jax.config import ConfigError

    try:
        code: int = options.command(options)
    except ConfigError as error:
        print(f"tianji: {error}", file=sys.stderr)
        return REFUSED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tianji", description="Asynchronous deep reinforcement learning on JAX.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_training(commands)
    _add_saved(commands)
    _add_looking_back(commands)
    _add_setting_up(commands)
    add_compile(commands, OVERRIDES)
    return parser


def _add_training(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    train = commands.add_parser("train", help="train an agent")
    _add_run(train)
    train.set_defaults(command=_train)

    learner = commands.add_parser("learner", help="train an agent with learners on several hosts; run it on each")
    _add_run(learner)
    learner.add_argument(
        "--coordinator", metavar="HOST:PORT", help="host of learner 0 and a free port, the next one too"
    )
    learner.add_argument("--process", metavar="RANK/SIZE", help="which learner this is of how many, for example 0/2")
    learner.set_defaults(command=_learner)

    watch = commands.add_parser("watch", help="show how a run stands, from another terminal")
    watch.add_argument("run", type=Path, help="folder of a run")
    watch.set_defaults(command=_watch)

    actor = commands.add_parser("actor", help="act for a learner that runs elsewhere (its actors.listen)")
    actor.add_argument("config", help="a YAML file that agrees with the learner's")
    actor.add_argument("overrides", nargs="*", help=OVERRIDES)
    actor.add_argument("--connect", metavar="tcp://HOST:PORT", required=True, help="where the learner listens")
    actor.add_argument("--count", type=int, default=1, metavar="K", help="actors, each a thread of this process")
    actor.add_argument("--id", type=int, help="of the first actor; drawn when it is not given")
    actor.set_defaults(command=_actor)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", help="a YAML file; configs/ has one for each run worth repeating")
    parser.add_argument("overrides", nargs="*", help=OVERRIDES)
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="go on with the run in this folder, with its own configuration unless another is given",
    )
    parser.add_argument(
        "--profile",
        type=_positive,
        nargs="?",
        const=20,
        default=0,
        metavar="N",
        help="profile N updates (20) after the first few: what JAX runs, and a timeline of all threads and actors",
    )


def _add_saved(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    evaluate = commands.add_parser("eval", help="play a saved policy, greedily and sampled")
    evaluate.add_argument("run", type=Path, help="folder of a run")
    evaluate.add_argument("--episodes", type=int, default=100, help="how many (100)")
    evaluate.add_argument("--best", action="store_true", help="the checkpoint with the best return, not the newest")
    evaluate.add_argument("--seed", type=int, default=0, help="of the environments and of sampling (0)")
    mode = evaluate.add_mutually_exclusive_group()
    mode.add_argument("--greedy", action="store_true", default=None, help="only the policy's mode")
    mode.add_argument("--sampled", dest="greedy", action="store_false", default=None, help="only samples")
    evaluate.add_argument("--video", type=Path, metavar="FILE.mp4", help="film one more episode")
    evaluate.set_defaults(command=_evaluate)

    export = commands.add_parser("export", help="write a saved policy for programs without tianji_jax")
    export.add_argument("run", type=Path, help="folder of a run")
    export.add_argument("--output", type=Path, metavar="DIR", help="folder to write to (policy-VERSION in the run's)")
    export.add_argument("--best", action="store_true", help="the checkpoint with the best return, not the newest")
    export.add_argument("--greedy", action="store_true", help="the policy's mode, not samples")
    export.add_argument("--batch", type=int, metavar="N", help="for N observations at a time only (any number)")
    export.set_defaults(command=_export)


def _add_looking_back(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    runs = "folders of runs, or folders that hold them; runs that differ in their seed only are one group"
    plot = commands.add_parser("plot", help="draw return, policy lag and throughput of runs")
    plot.add_argument("runs", type=Path, nargs="+", metavar="RUN", help=runs)
    plot.add_argument("--x", choices=("steps", "frames", "seconds"), default="steps", help="draw against these (steps)")
    plot.add_argument(
        "--output", type=Path, default=Path("curves.png"), metavar="FILE.png", help="or .pdf or .svg (curves.png)"
    )
    plot.add_argument("--title", help="what all runs have in common, if it is not given")
    plot.add_argument("--goal", type=_finite, metavar="R", help="a dashed line at this return")
    plot.set_defaults(command=_plot)

    compare = commands.add_parser("compare", help="tell what runs took to reach a return, and how they ended")
    compare.add_argument("runs", type=Path, nargs="+", metavar="RUN", help=runs)
    compare.add_argument(
        "--return",
        dest="goal",
        type=_finite,
        metavar="R",
        help="the return to reach (run.stop_at_return, else within 10 %% of the best)",
    )
    compare.set_defaults(command=_compare)
    for command in (plot, compare):
        command.add_argument(
            "--label", nargs="+", default=[], help="one for each RUN, or one for all: those of the same are one group"
        )


def _add_setting_up(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    config = commands.add_parser("config", help="check a configuration and print it with every default")
    config.add_argument("config", help="a YAML file")
    config.add_argument("overrides", nargs="*", help=OVERRIDES)
    config.set_defaults(command=_config)

    keys = commands.add_parser("keys", help="make keys for actors on other hosts")
    keys.add_argument("action", choices=["new"], help="new: write a pair for the learner and one for an actor")
    keys.add_argument("directory", help="folder to write to; security.keys names it later")
    keys.add_argument("--actor", metavar="NAME", help="write a pair for one more actor to a folder that has keys")
    keys.set_defaults(command=_keys)

    environments = commands.add_parser("environments", help="list the names of environments")
    environments.add_argument("word", nargs="?", default="", help="only names that contain this")
    environments.set_defaults(command=_environments)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def _finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return number


def _train(options: argparse.Namespace) -> int:
    from tianji_jax.checkpoint import CheckpointError
    from tianji_jax.launch import train
    from tianji_jax.worker import WorkerError

    config = _configured(options)
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


def _configured(options: argparse.Namespace) -> "Config":
    """The configuration that `train` and `learner` are told."""
    from tianji_jax.config import ConfigError, load

    overrides = list(options.overrides)
    if options.resume is not None and options.config is not None and "=" in options.config:
        overrides.insert(0, options.config)
        options.config = None
    if options.config is None and options.resume is None:
        raise ConfigError("train what? Name a configuration (tianji train configs/x.yaml) or a run (--resume runs/x)")
    if options.resume is None:
        return load(options.config, overrides)
    return _resumed(options.resume, options.config, overrides)


def _learner(options: argparse.Namespace) -> int:
    from tianji_jax.keeper import Child, Keeper, find_place

    config, place = _configured(options), find_place(options.coordinator, options.process)
    arguments = [*([options.config] if options.config else []), *options.overrides]
    arguments += ["--resume", str(options.resume)] if options.resume else []
    arguments += ["--profile", str(options.profile)] if options.profile else []
    return Keeper(place, config, lambda: Child(place, arguments)).run()


def _resumed(run: Path, path: str | None, overrides: Sequence[str]) -> "Config":
    """The configuration to go on with; shows where it differs from the run's."""
    from tianji_jax.config import ConfigError, difference, load
    from tianji_jax.run_folder import CONFIG

    if not (run / CONFIG).is_file():
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
    traceback.print_exception(error.__cause__ or error)
    # The rest is in the traceback.
    print(f"tianji: {str(error).splitlines()[0]}", file=sys.stderr)
    return FAILED


def _watch(options: argparse.Namespace) -> int:
    from tianji_jax.watch import watch

    print(watch(options.run))
    return 0


def _actor(options: argparse.Namespace) -> int:
    from tianji_jax.config import load
    from tianji_jax.remote_actor import act
    from tianji_jax.worker import WorkerError

    try:
        act(load(options.config, options.overrides), options.connect, options.count, options.id)
    except WorkerError as error:
        return _failed(error)
    return 0


def _evaluate(options: argparse.Namespace) -> int:
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


def _export(options: argparse.Namespace) -> int:
    from tianji_jax.export import EXAMPLE, export

    folder = export(options.run, options.output, best=options.best, greedy=options.greedy, batch=options.batch)
    print(f"wrote {folder}; try it: python {folder / EXAMPLE}")
    return 0


def _plot(options: argparse.Namespace) -> int:
    from tianji_jax.curves import plot
    from tianji_jax.records import gather

    plot(gather(options.runs, options.label), options.output, options.x, options.title, options.goal)
    print(f"wrote {options.output}")
    return 0


def _compare(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tianji_jax.comparison import compare
    from tianji_jax.records import gather

    compare(gather(options.runs, options.label), options.goal, Console())
    return 0


def _config(options: argparse.Namespace) -> int:
    from tianji_jax.blueprint import plan
    from tianji_jax.config import load, to_yaml

    config = load(options.config, options.overrides)
    plan(config)
    print(to_yaml(config), end="")
    return 0


def _keys(options: argparse.Namespace) -> int:
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


def _environments(options: argparse.Namespace) -> int:
    from tianji_jax.environments import names

    found = names(options.word)
    print("\n".join(found) if found else f"no environment has {options.word!r} in its name")
    return 0 if found else FAILED


if __name__ == "__main__":
    command()
