"""The coordinator's requests to nodes on behalf of watchers and operators, or because the job hangs; and the answers.
Plain data.
"""

from __future__ import annotations

from enum import StrEnum

from rallypoint.base.light_typing import NamedTuple
from rallypoint.membership.state import NodeRange

MAX_PART = 48 * 1024
"""Bytes in one part of a message that is sent in parts."""


class ReportRequested(NamedTuple):
    """There is a watcher: answer with a `NodeReport`."""


class NodeReport(NamedTuple):
    """A node's answer to `ReportRequested`: its workers by local rank. All ages are in seconds.

    `progress` is the last step that a worker has reported, -1 if none has; `progress_age` and `output_ages` are -1 if
    there was none.
    """

    round: int
    pids: tuple[int, ...] = ()
    restarts_left: int = -1
    progress: int = -1
    progress_age: float = -1.0
    output_ages: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    """The last step of each worker, -1 if it has reported none; empty if none has, or there are very many."""


class CollectKind(StrEnum):
    """What can be collected from nodes."""

    STACKS = "stacks"
    BUNDLE = "bundle"
    HANG = "hang"
    """The evidence of a hang, of all workers."""


class CollectRequested(NamedTuple):
    """Collect something from a node's workers, or from that of a global `rank`; answered by `CollectedPart`s."""

    number: int
    kind: CollectKind
    rank: int = -1


class CollectedPart(NamedTuple):
    """A part of a node's collection. Sent by the node, and on to the requester with the node's name filled in."""

    number: int
    """The number of the collection."""
    data: bytes
    is_last: bool
    node: str = ""


class DrainRequested(NamedTuple):
    """An operator asks this node to leave, after its workers were notified."""

    by: str


class OperatorAction(NamedTuple):
    """An operator's command was carried out: a line for the log of every node. `size` is that of future rounds, if the
    command has changed it: nodes keep it for a control plane that has lost it.
    """

    by: str
    text: str
    size: NodeRange | None = None


class HangFound(NamedTuple):
    """All ranks of all nodes of `round` are quiet; each node's evidence about its workers is collected next."""

    round: int
    nodes: int


class CollectionEnded(NamedTuple):
    """For the node that reports a hang: no more parts follow. `silent` are the nodes that have not answered."""

    number: int
    round: int
    silent: tuple[str, ...] = ()


class HangReport(NamedTuple):
    """The text of a report about all workers of a job that hangs. Sent by the reporting node; then to all."""

    number: int
    round: int
    report: str


NodeAnswer = NodeReport | CollectedPart | HangReport
"""The answers of a node to such requests."""
HangNotification = HangFound | CollectedPart | CollectionEnded | HangReport
