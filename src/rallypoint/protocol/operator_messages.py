"""What the coordinator asks of nodes for those who watch and steer the job, or because it hangs; and the answers. Plain
data."""

from __future__ import annotations

from enum import StrEnum

from rallypoint.base.light_typing import NamedTuple
from rallypoint.membership.state import NodeRange

MAX_PART = 48 * 1024
"""Bytes in one part of what travels in parts."""


class ReportRequested(NamedTuple):
    """Somebody watches: answer with a `NodeReport`."""


class NodeReport(NamedTuple):
    """A node's answer to `ReportRequested`: its workers by local rank. All ages are in seconds.

    `progress` is the last step that a worker has told, -1 if none has; `progress_age` and `output_ages` are -1 where
    nothing has come.
    """

    round: int
    pids: tuple[int, ...] = ()
    restarts_left: int = -1
    progress: int = -1
    progress_age: float = -1.0
    output_ages: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    """The last step of each worker, -1 if it has told none; empty if none has, or there are very many."""


class CollectKind(StrEnum):
    """What can be collected of nodes."""

    STACKS = "stacks"
    BUNDLE = "bundle"
    HANG = "hang"
    """The evidence of a hang, of all workers."""


class CollectRequested(NamedTuple):
    """Collect something of your workers, or of the one of that global `rank`; answer with `CollectedPart`s."""

    number: int
    kind: CollectKind
    rank: int = -1


class CollectedPart(NamedTuple):
    """A part of what a node has collected. From a node, and on to who asked, with the node's name filled in."""

    number: int
    """Of the collection."""
    data: bytes
    is_last: bool
    node: str = ""


class DrainRequested(NamedTuple):
    """An operator asks this node to leave, after its workers were notified."""

    by: str


class OperatorAction(NamedTuple):
    """An operator's command was carried out: a line for the log of every node. `size` is that of the rounds to come,
    where the command has changed it: nodes know it when the control plane has forgotten."""

    by: str
    text: str
    size: NodeRange | None = None


class HangFound(NamedTuple):
    """All ranks of all nodes of `round` are quiet; what each node can tell of its workers is collected next."""

    round: int
    nodes: int


class CollectionEnded(NamedTuple):
    """For the node that reports of a hang: no more parts follow. `silent` are the nodes that have not answered."""

    number: int
    round: int
    silent: tuple[str, ...] = ()


class HangReport(NamedTuple):
    """What has been seen of all workers of a job that hangs, in words. From the node that reports; then to all."""

    number: int
    round: int
    report: str


NodeAnswer = NodeReport | CollectedPart | HangReport
"""What a node says because it was asked."""
HangNotification = HangFound | CollectedPart | CollectionEnded | HangReport
