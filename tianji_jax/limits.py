"""Which stage limits a run, and what would help.

A run is a line of workers, each with its stages (`*_time/*` in a report): actors, receiver, batcher, dispatcher,
learner. The one that never waits holds up the others. It is looked for from the end of the line: the learner if it
hardly waits for batches, else the batcher or the receiver if those hardly wait for trajectories, else the actors.
"""

from collections.abc import Mapping
from typing import Any

from tianji_jax.config import Config
from tianji_jax.usage import available_cores

BUSY = 0.8
"""A worker that works for so much of its time limits the run."""

CROWDED = 0.85
"""More of the machine's cores in use leave no room for further actors."""


def what_limits(report: Mapping[str, Any]) -> str | None:
    """The stage that limits the run by a report's shares of time; None while nothing has been learned from.

    One of `update`, `publishing`, `checkpoints`, `assembly`, `transfer`, `receiving`, `credit`, `environments`,
    `inference`, `building`, `sending`.
    """
    learner, batcher, actor = (_stages(report, worker) for worker in ("learner", "batcher", "actor"))
    if "updating" not in learner or not actor:
        return None
    if report.get("dispatcher_time/checkpoints", 0.0) > 0.5:
        return "checkpoints"
    if learner.get("waiting", 0.0) <= 1 - BUSY:
        stage = max(("updating", "transfer", "publishing"), key=lambda stage: learner.get(stage, 0.0))
        return "update" if stage == "updating" else stage
    if batcher.get("waiting", 1.0) <= 1 - BUSY:
        return "assembly"
    if _stages(report, "receiver").get("waiting", 1.0) <= 1 - BUSY:
        return "receiving"
    # Both are waits for the learner: for it to take trajectories, and for what it made of them.
    actor["credit"] = actor.get("credit", 0.0) + actor.pop("parameters", 0.0)
    stage = max(actor, key=lambda stage: actor[stage])
    return "environments" if stage == "environment" else stage


def advice(report: Mapping[str, Any], config: Config) -> str | None:
    """The stage that limits the run, and what would help; None while nothing is known."""
    stage = report.get("limited_by")
    if stage is None:
        return None

    def share(name: str) -> str:
        return f"{report.get(name, 0.0):.0%}"

    waiting = share("learner_time/waiting")
    sentences = {
        "update": "the learner never waits for data: more actors will not help; more devices, a smaller network or "
        + ("a smaller replay.samples_per_insert" if "samples_per_insert" in report else "fewer passes over a batch")
        + " will",
        "publishing": f"fetching and sending parameters takes {share('learner_time/publishing')} of the learner's "
        "time: larger batches mean fewer versions",
        "checkpoints": f"the learner waits {share('dispatcher_time/checkpoints')} of its time for the disk: save less "
        "often (checkpoint.every_seconds, checkpoint.every_learner_steps)",
        "assembly": f"joining trajectories takes {share('batcher_time/assembly')} of the batcher's time: fewer and "
        "larger trajectories help (actors.environments, actors.unroll_length)",
        "transfer": f"updates wait {share('learner_time/transfer')} of the time for their batch to reach the devices: "
        "smaller observations help, uint8 for images",
        "receiving": f"taking in messages takes {share('receiver_time/receiving')} of the receiver's time: larger "
        "trajectories help (actors.environments, actors.unroll_length)",
        "credit": f"actors and learner wait for each other ({share('actor_time/credit')} and {waiting} of their time): "
        f"a larger staleness.max_lag (now {config.staleness.max_lag}) lets more of them work at once",
        "environments": f"they take {share('actor_time/environment')} of the actors' time; {_room(report, config)}",
        "inference": f"choosing actions takes {share('actor_time/inference')} of the actors' time: more environments "
        f"for each actor (actors.environments, now {config.actors.environments}) or a smaller network help"
        + (", or actors.device=accelerator where there is one" if config.actors.device == "cpu" else ""),
        "building": f"filling trajectories takes {share('actor_time/building')} of the actors' time: smaller "
        "observations help",
        "sending": f"it takes {share('actor_time/sending')} of the actors' time: the network is too slow for them",
    }
    return f"{stage}: {sentences[stage]}"


def _room(report: Mapping[str, Any], config: Config) -> str:
    """Whether more actors would help on this machine."""
    cores = available_cores()
    used, busy = report.get("cores_used", 0.0), report.get("cores_busy", 0.0)
    if busy >= CROWDED * cores:
        others = f", others {busy - used:.1f}" if busy - used > 0.15 * cores else ""
        return f"this run uses {used:.1f} of {cores} cores{others}; more actors will not help on this machine"
    how = "actors.count or actors.environment_threads" if config.environment.name.startswith("envpool:") else "actors"
    processes = "" if config.actors.placement == "process" else ", or actors.placement=process,"
    return f"this run uses {used:.1f} of {cores} cores; more {how}{processes} will help"


def _stages(report: Mapping[str, Any], worker: str) -> dict[str, float]:
    prefix = f"{worker}_time/"
    return {name.removeprefix(prefix): value for name, value in report.items() if name.startswith(prefix)}
