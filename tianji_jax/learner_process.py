"""The training process of a learner that is one of several; started by its keeper.

python -m tianji_jax.learner_process HOST:PORT RANK SIZE FD [arguments of tianji train]
"""

import os
import sys
import threading
import time

import jax

from tianji_jax.cli import main as tianji
from tianji_jax.roll import IN_ORDER
from tianji_jax.startup import collect_garbage_seldom
from tianji_jax.transport import BEAT_SECONDS


def main() -> None:
    """Join the others, train, leave together; the exit code is that of `tianji train`."""
    coordinator, rank, size, beats, *arguments = sys.argv[1:]
    collect_garbage_seldom()
    threading.Thread(target=_beat, args=(int(beats),), name="beats", daemon=True).start()
    threading.Thread(target=_until_end_of_input, name="keeper watch", daemon=True).start()
    # The keepers notice sooner who is lost, and say who it is.
    jax.distributed.initialize(coordinator, int(size), int(rank), heartbeat_timeout_seconds=600)
    code = tianji(["train", *arguments])
    if code in IN_ORDER:
        jax.distributed.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _beat(fd: int) -> None:
    while True:
        os.write(fd, b".")
        time.sleep(BEAT_SECONDS)


def _until_end_of_input() -> None:
    """Without its keeper nobody would end it."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
