"""`tianji compile`: what an update needs of a TPU pod, found without one.

A pod is compiled for in a process of its own (`python -m tianji_jax.compile_command TOPOLOGY CONFIG OVERRIDES...`),
which writes one JSON object: libtpu wants to be told things before JAX is loaded, writes to standard error as it
likes, and may end the process it is in.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from tianji_jax.startup import collect_garbage_seldom

if TYPE_CHECKING:
    from tianji_jax.config import Config

FAILED = 1

ENVIRONMENT = {
    # TPUs of this machine, if there are any, stay free for others.
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # Without these libtpu asks the cloud's metadata server for them, which elsewhere does not answer.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    # Neither files in /tmp/tpu_logs nor warnings.
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}
"""Of the process that compiles for a pod."""


def add_compile(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", overrides: str) -> None:
    """Add the command to those of `tianji`; `overrides` is the help on these."""
    parser = commands.add_parser("compile", help="tell what an update needs of a TPU pod, and how fast it can be")
    parser.add_argument("config", help="a YAML file")
    parser.add_argument("overrides", nargs="*", help=overrides)
    parser.add_argument(
        "--topology",
        metavar="NAME",
        help="a slice of a pod that need not be there, such as v5e:16x16, or gpu: those of this machine (the learner's "
        "devices on this machine)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, in bytes and seconds")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """The command; 1 where the update does not fit into memory.

    Raises:
      ConfigError: the configuration cannot run there, or there is no such topology.
    """
    from tianji_jax.config import ConfigError, load
    from tianji_jax.estimate import lines

    overrides = list(options.overrides)
    if options.topology in (None, "gpu"):
        overrides += [] if options.topology is None else ["learner.platform=gpu"]
        answer = _answer(load(options.config, overrides), None)
    else:
        answer = _compiled_elsewhere(options.topology, options.config, overrides)
    if "refused" in answer:
        raise ConfigError(answer["refused"])
    if "does_not_fit" in answer:
        print(f"tianji: does not fit: {answer['does_not_fit']}", file=sys.stderr)
        return FAILED
    report = answer["report"]
    print(json.dumps(report) if options.json else "\n".join(lines(report)))
    return FAILED if report["fits"] is False else 0


def _compiled_elsewhere(topology: str, path: str, overrides: list[str]) -> dict[str, Any]:
    from tianji_jax.chips import find_topology
    from tianji_jax.config import ConfigError

    try:
        find_topology(topology)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"--topology {topology}: compiling for TPUs takes libtpu, which is not installed: "
            "pip install 'tianji_jax[tpu]'"
        )
    # How long compiling takes is for the user to judge, who can stop it: Ctrl-C ends the other process too.
    done = subprocess.run(
        [sys.executable, "-m", "tianji_jax.compile_command", topology, path, *overrides],
        env={**os.environ, **ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        print(f"{done.stderr}\ntianji: the process that compiles ended with {done.returncode}", file=sys.stderr)
        raise SystemExit(FAILED)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _answer(config: "Config", topology: Any) -> dict[str, Any]:
    from tianji_jax.compilation import DoesNotFitError, measure

    try:
        return {"report": measure(config, topology)}
    except DoesNotFitError as error:
        return {"does_not_fit": str(error)}


def main() -> None:
    """The process that compiles for a pod."""
    collect_garbage_seldom()
    from tianji_jax.chips import find_topology
    from tianji_jax.config import ConfigError, load

    name, path, *overrides = sys.argv[1:]
    try:
        answer = _answer(load(path, overrides), find_topology(name))
    except ConfigError as error:
        answer = {"refused": str(error)}
    print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
