"""Connects a handler to the control plane of its job: the part that differs between backends."""

from __future__ import annotations

import os

from rallypoint.base.clock import Deadline
from rallypoint.base.endpoint import host_name
from rallypoint.base.light_typing import TYPE_CHECKING, NamedTuple
from rallypoint.control.membership.state import NodeId, Settings
from rallypoint.control.protocol.messages import Deliver, Link

FIRST_PROGRESS_REQUEST, MAX_PROGRESS_INTERVAL = 2.0, 60.0
"""Seconds until a waiting node asks for the progress for the first time, and at most between later times. Each interval
is twice the previous one: a spare that waits for days must not fill the log.
"""

if TYPE_CHECKING:
    from rallypoint.control.protocol.observation import Snapshot


class LocalJob(NamedTuple):
    """What an agent tells commands on its machine about its job, in terms of `--rdzv-backend` and the like."""

    pid: int
    job: str
    backend: str
    endpoint: str


class ControlPlane:
    """One node's end of the control plane. Nothing is opened before `open`."""

    def __init__(
        self, settings: Settings, where: str = "", endpoint_flag: str = "endpoint", rank_hint: int | None = None
    ) -> None:
        """Hold what the user has said.

        Args:
            settings: bounds and times of the job.
            where: where the nodes meet, as in `at host:port`, for people to read.
            endpoint_flag: what the user gave that by, for the same.
            rank_hint: the group rank to ask for.
        """
        self.settings = settings
        self.where = where
        self.endpoint_flag = endpoint_flag
        self.rank_hint = rank_hint

    def open(self, deliver: Deliver, deadline: Deadline) -> Link:
        """Make the link, once.

        Args:
            deliver: called with every notification.
            deadline: the time until which it may try to connect.
        """
        raise NotImplementedError

    def hosts_coordinator(self) -> bool:
        """Whether the coordinator is in this process at the moment."""
        return False

    def snapshot(self) -> Snapshot | None:
        """The snapshot of the job, if the coordinator is in this process; else None."""
        return None

    def watch_endpoint(self) -> str:
        """The `--rdzv-endpoint` at which commands on this machine find the coordinator; empty if they cannot."""
        return ""

    def close(self) -> None:
        """End what else belongs to it, after the link: a server, a candidacy. Idempotent."""


def own_node(address: str = "") -> NodeId:
    """The identity of a handler of this process that others reach at `address`; without that its link fills it in."""
    return NodeId(address, os.getpid(), int.from_bytes(os.urandom(8), "big") >> 2, host_name())
