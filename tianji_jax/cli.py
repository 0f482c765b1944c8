"""The command line: `tianji train`, `watch`, `eval`, `export`, `plot`, `compare`, `actor`, `config` and others."""

import argparse
import logging
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tianji_jax import commands
from tianji_jax.commands import FAILED, REFUSED
from tianji_jax.compile_command import add_compile
from tianji_jax.interrupts import INTERRUPTED, PREEMPTED, Preempted, interrupts
from tianji_jax.startup import collect_garbage_seldom

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
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_training(parsers)
    _add_saved(parsers)
    _add_looking_back(parsers)
    _add_setting_up(parsers)
    add_compile(parsers, OVERRIDES)
    return parser


def _add_training(parsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    train = parsers.add_parser("train", help="train an agent")
    _add_run(train)
    train.set_defaults(command=commands.train)

    learner = parsers.add_parser("learner", help="train an agent with learners on several hosts; run it on each")
    _add_run(learner)
    learner.add_argument(
        "--coordinator", metavar="HOST:PORT", help="host of learner 0 and a free port, the next one too"
    )
    learner.add_argument("--process", metavar="RANK/SIZE", help="which learner this is of how many, for example 0/2")
    learner.set_defaults(command=commands.learner)

    root = parsers.add_parser("root", help="fuse what several runs learn, groups that train together (groups.root)")
    root.add_argument("config", help="a YAML file that agrees with the groups'")
    root.add_argument("overrides", nargs="*", help=OVERRIDES)
    root.set_defaults(command=commands.root)

    watch = parsers.add_parser("watch", help="show how a run stands, from another terminal")
    watch.add_argument("run", type=Path, help="folder of a run")
    watch.set_defaults(command=commands.watch)

    actor = parsers.add_parser("actor", help="act for a learner that runs elsewhere (its actors.listen)")
    actor.add_argument("config", help="a YAML file that agrees with the learner's")
    actor.add_argument("overrides", nargs="*", help=OVERRIDES)
    actor.add_argument("--connect", metavar="tcp://HOST:PORT", required=True, help="where the learner listens")
    actor.add_argument("--count", type=int, default=1, metavar="K", help="actors, each a thread of this process")
    actor.add_argument("--id", type=int, help="of the first actor; drawn when it is not given")
    actor.set_defaults(command=commands.actor)


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


def _add_saved(parsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    evaluate = parsers.add_parser("eval", help="play a saved policy, greedily and sampled")
    evaluate.add_argument("run", type=Path, help="folder of a run")
    evaluate.add_argument("--episodes", type=int, default=100, help="how many (100)")
    evaluate.add_argument("--best", action="store_true", help="the checkpoint with the best return, not the newest")
    evaluate.add_argument("--seed", type=int, default=0, help="of the environments and of sampling (0)")
    mode = evaluate.add_mutually_exclusive_group()
    mode.add_argument("--greedy", action="store_true", default=None, help="only the policy's mode")
    mode.add_argument("--sampled", dest="greedy", action="store_false", default=None, help="only samples")
    evaluate.add_argument("--video", type=Path, metavar="FILE.mp4", help="film one more episode")
    evaluate.set_defaults(command=commands.evaluate)

    export = parsers.add_parser("export", help="write a saved policy for programs without tianji_jax")
    export.add_argument("run", type=Path, help="folder of a run")
    export.add_argument("--output", type=Path, metavar="DIR", help="folder to write to (policy-VERSION in the run's)")
    export.add_argument("--best", action="store_true", help="the checkpoint with the best return, not the newest")
    export.add_argument("--greedy", action="store_true", help="the policy's mode, not samples")
    export.add_argument("--batch", type=int, metavar="N", help="for N observations at a time only (any number)")
    export.set_defaults(command=commands.export)


def _add_looking_back(parsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    runs = "folders of runs, or folders that hold them; runs that differ in their seed only are one group"
    plot = parsers.add_parser("plot", help="draw return, policy lag and throughput of runs")
    plot.add_argument("runs", type=Path, nargs="+", metavar="RUN", help=runs)
    plot.add_argument("--x", choices=("steps", "frames", "seconds"), default="steps", help="draw against these (steps)")
    plot.add_argument(
        "--output", type=Path, default=Path("curves.png"), metavar="FILE.png", help="or .pdf or .svg (curves.png)"
    )
    plot.add_argument("--title", help="what all runs have in common, if it is not given")
    plot.add_argument("--goal", type=_finite, metavar="R", help="a dashed line at this return")
    plot.set_defaults(command=commands.plot)

    compare = parsers.add_parser("compare", help="tell what runs took to reach a return, and how they ended")
    compare.add_argument("runs", type=Path, nargs="+", metavar="RUN", help=runs)
    compare.add_argument(
        "--return",
        dest="goal",
        type=_finite,
        metavar="R",
        help="the return to reach (run.stop_at_return, else within 10 %% of the best)",
    )
    compare.set_defaults(command=commands.compare)
    for command in (plot, compare):
        command.add_argument(
            "--label", nargs="+", default=[], help="one for each RUN, or one for all: those of the same are one group"
        )


def _add_setting_up(parsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    config = parsers.add_parser("config", help="check a configuration and print it with every default")
    config.add_argument("config", help="a YAML file")
    config.add_argument("overrides", nargs="*", help=OVERRIDES)
    config.set_defaults(command=commands.config)

    keys = parsers.add_parser("keys", help="make keys for actors on other hosts")
    keys.add_argument("action", choices=["new"], help="new: write a pair for the learner and one for an actor")
    keys.add_argument("directory", help="folder to write to; security.keys names it later")
    keys.add_argument("--actor", metavar="NAME", help="write a pair for one more actor to a folder that has keys")
    keys.set_defaults(command=commands.keys)

    environments = parsers.add_parser("environments", help="list the names of environments")
    environments.add_argument("word", nargs="?", default="", help="only names that contain this")
    environments.set_defaults(command=commands.environments)


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


if __name__ == "__main__":
    command()
