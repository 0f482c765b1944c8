"""How trajectories and parameters travel."""

from tianji_jax.transport.codec import PROTOCOL, Codec, Rejected
from tianji_jax.transport.events import Arrived, Credit, Event, Joined, Lost, MessageRejected, Refused, Requested
from tianji_jax.transport.parameters import ParameterClient, ParameterServer, VersionGone
from tianji_jax.transport.sockets import local_address
from tianji_jax.transport.trajectories import TrajectoryClient, TrajectoryServer

__all__ = [
    "PROTOCOL",
    "Arrived",
    "Codec",
    "Credit",
    "Event",
    "Joined",
    "Lost",
    "MessageRejected",
    "ParameterClient",
    "ParameterServer",
    "Refused",
    "Rejected",
    "Requested",
    "TrajectoryClient",
    "TrajectoryServer",
    "VersionGone",
    "local_address",
]
