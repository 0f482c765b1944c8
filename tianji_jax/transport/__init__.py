"""How trajectories and parameters travel."""

from tianji_jax.transport.codec import PROTOCOL, Codec, Rejected
from tianji_jax.transport.events import Arrived, Credit, Event, Joined, Lost, MessageRejected, Refused, Requested
from tianji_jax.transport.groups import Answer, GroupsRefused, Progress, RootLink, RootSocket, Together, Word
from tianji_jax.transport.keys import (
    Authenticator,
    ClientKeys,
    KeyFileError,
    ServerKeys,
    load_client_keys,
    load_server_keys,
    make_keys,
)
from tianji_jax.transport.meeting import BEAT_SECONDS, Meeting, Patience, Standing, open_meeting
from tianji_jax.transport.parameters import ParameterClient, ParameterRelay, ParameterServer, VersionGone
from tianji_jax.transport.peers import ID_LIMIT
from tianji_jax.transport.router import Outside
from tianji_jax.transport.sockets import is_loopback, local_address
from tianji_jax.transport.trajectories import TrajectoryServer
from tianji_jax.transport.trajectory_client import TrajectoryClient

__all__ = [
    "BEAT_SECONDS",
    "ID_LIMIT",
    "PROTOCOL",
    "Answer",
    "Arrived",
    "Authenticator",
    "ClientKeys",
    "Codec",
    "Credit",
    "Event",
    "GroupsRefused",
    "Joined",
    "KeyFileError",
    "Lost",
    "Meeting",
    "MessageRejected",
    "Outside",
    "ParameterClient",
    "ParameterRelay",
    "ParameterServer",
    "Patience",
    "Progress",
    "Refused",
    "Rejected",
    "Requested",
    "RootLink",
    "RootSocket",
    "ServerKeys",
    "Standing",
    "Together",
    "TrajectoryClient",
    "TrajectoryServer",
    "VersionGone",
    "Word",
    "is_loopback",
    "load_client_keys",
    "load_server_keys",
    "local_address",
    "make_keys",
    "open_meeting",
]
