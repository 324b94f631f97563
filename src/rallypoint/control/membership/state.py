"""The rendezvous state, and the operations that change it: plain frozen data, the same for every backend.

The fields and lists are those in the contract's section 4.5 and our own: the previous round's nodes, those that
succeeded, the ledger and the verdict. No field is a point in time: only an observer knows times, on its own clock
(`observer.StateObserver`). The state contains counters instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum, StrEnum, auto

from rallypoint.base.light_typing import NamedTuple
from rallypoint.failures.cause import Cause, Ending, Restarts


class NodeId(NamedTuple):
    """One agent of the job, with the name that it chose once. Ordered by its fields; people read the host's name."""

    addr: str
    """Its address on the way to its first coordinator."""
    pid: int
    number: int
    """A random number that no other agent has or can guess."""
    host: str = ""
    """The name of its machine, for people; empty if unknown."""

    def __str__(self) -> str:
        return self.host or self.addr or f"the node of group rank {self.number}"

    @classmethod
    def placeholder(cls, rank: int) -> NodeId:
        """The placeholder for the node of a group rank that has not reported to a new control plane."""
        return cls("", 0, rank)

    @property
    def is_placeholder(self) -> bool:
        """Whether this stands for a node that has not reported yet."""
        return not self.addr


class NodeInfo(NamedTuple):
    """All that others need to know about a node, sent when it joins so that no exchange is needed later.

    `address` and `store_port`: where the node's worker store listens if it becomes group rank 0. `rank_hint`: the group
    rank that it requests. `max_restarts`, `program`: its own values, -1 and empty if unset; the first node's values
    become the job's, and other nodes are warned if theirs differ. `restarts_workers`: some of its workers from the
    previous round cannot continue in their processes. `domain`: the name of the machines whose GPUs are well connected
    with this one's; empty if unknown (`segments`).
    """

    role: str
    local_world_size: int
    address: str
    store_port: int
    rank_hint: int | None = None
    max_restarts: int = -1
    program: str = ""
    restarts_workers: bool = False
    domain: str = ""


class NodeRanks(NamedTuple):
    """The ranks of a node's first worker, and the sizes that all its workers see.

    The worker of local rank `l` has the global rank `base_rank + l` and the role rank `base_role_rank + l`.
    """

    base_rank: int
    world_size: int
    base_role_rank: int
    role_world_size: int


class Participant(NamedTuple):
    """A member of the current round; its group rank is valid once the round is complete.

    `previous_rank` is its group rank in the previous round, None for a new node.
    """

    node_info: NodeInfo
    rank: int = 0
    previous_rank: int | None = None


def hint_of(_node: NodeId, participant: Participant) -> int | None:
    """The group rank that a participant requested."""
    return participant.node_info.rank_hint


class Reason(StrEnum):
    """Why a round ended."""

    FAILURE = "a worker failed"
    LOST = "a node was lost"
    DEPARTED = "a node left"
    GAVE_UP = "a node gave up"
    DRAINED = "the membership changes"
    REQUESTED = "an operator asked for a restart"
    FORGOTTEN = "how it ended is no longer known"


class RoundEnd(NamedTuple):
    """The end of one round: its number, the reason, the node that caused it, and the failure if any.

    `node` is a readable name, empty if unknown; `detail` says more about the reason, if there is more to say.
    `missing_nodes` is the number of nodes that must join before another round is possible. `restarts` is the number of
    restarts used, including the one that follows a failure.
    """

    round: int
    reason: Reason
    node: str
    cause: Cause | None = None
    detail: str = ""
    missing_nodes: int = 0
    restarts: Restarts = Restarts()
    held_back: float = 0.0
    """Seconds by which the next round is delayed after a failure without progress."""
    restarts_workers: bool = False
    """Whether no worker continues in its process, because not all on the failed node can."""


class RemovedNode(NamedTuple):
    """A node that left the job, its name and the reason. `ended_with_0`: all its workers ended with 0."""

    node: NodeId
    name: str
    reason: Reason
    ended_with_0: bool = False


class AbandonedRendezvous(NamedTuple):
    """The last rendezvous that failed because a needed node's deadline passed.

    `number` counts such rendezvous. `given_up_by` is that node, which waited for `seconds`. `joined`, `members` and
    `expected` describe the progress: how many nodes joined, a few of their names, and the nodes still expected, if
    known.
    """

    number: int = 0
    given_up_by: str = ""
    seconds: float = 0.0
    joined: int = 0
    members: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()


class Ledger(NamedTuple):
    """The job's counts of ended rounds, by cause. Only failures use up restarts."""

    failures: int = 0
    lost: int = 0
    departed: int = 0
    drained: int = 0
    requested: int = 0


class NodeRange(NamedTuple):
    """The minimum and maximum number of nodes in a round."""

    min_nodes: int
    max_nodes: int


class FailureStreak(NamedTuple):
    """Consecutive failures that ended a round without progress, and how often the last failure recurred.

    `line` identifies the last failure (`failures.kinds.signature`); empty for none.
    """

    failures: int = 0
    repeats: int = 0
    line: str = ""


class JobProgress(NamedTuple):
    """The workers' progress as reported by nodes.

    `step` is the highest step reported, -1 for none. `round` is the last round that reached a new step (or, without
    step numbers, wrote anything new), -1 for none. `reported`: a node reports progress; then nothing else counts as
    progress.
    """

    step: int = -1
    round: int = -1
    reported: bool = False


class PreemptionNotice(NamedTuple):
    """A node that will be preempted in `seconds`; `why` is the reason, if known. With `whole_job` all nodes will be:
    `who` received the notice.
    """

    node: NodeId
    seconds: float
    whole_job: bool = False
    who: str = ""
    why: str = ""


class Outcome(StrEnum):
    """How a job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class Verdict(NamedTuple):
    """The job's end, sent to all nodes. For a failed job it contains the first failure, and in `detail` why no restart
    is left.

    An empty `detail` means the budget. `restarts` and `ending` (the reason) apply only to a failed job. `delegate` is
    the node that acts for a whole preempted job.
    """

    outcome: Outcome
    cause: Cause | None = None
    detail: str = ""
    restarts: Restarts = Restarts()
    ending: Ending = Ending.PROGRAM
    delegate: NodeId | None = None


class State(NamedTuple):
    """The state that all nodes agree on. Immutable, like its mappings and sets (`mappings`)."""

    round: int = 0
    complete: bool = False
    last_call: int = 0
    """Number of the running last call; 0 for none."""
    last_calls: int = 0
    """The number of last calls so far."""
    closed: bool = False
    participants: Mapping[NodeId, Participant] = {}
    wait_list: Mapping[NodeId, NodeInfo] = {}
    redundancy_list: Mapping[NodeId, NodeInfo] = {}
    survivors: Mapping[NodeId, int] = {}
    """Live nodes of the previous round that have not returned yet, with their group ranks in it."""
    succeeded: AbstractSet[NodeId] = frozenset()
    finished: Mapping[NodeId, Participant] = {}
    """Nodes that succeeded in the running round and left. A node that gets its placement late counts them."""
    heartbeats: Mapping[NodeId, int] = {}
    """Heartbeats of each node. Used if no sessions show that nodes are alive."""
    ledger: Ledger = Ledger()
    consents: AbstractSet[NodeId] = frozenset()
    """Nodes that consent to the end of the round, if workers are notified first."""
    preempted: PreemptionNotice | None = None
    """The last notice in this round that a node will be preempted, or the first one for the whole job."""
    failure_streak: FailureStreak = FailureStreak()
    restart_delay: float = 0.0
    """Seconds by which the forming round is delayed, counted from when it began to form."""
    restarts: int = 0
    """The number of restarts used when this round was complete: the value that its workers get."""
    origin: str = ""
    """The earlier coordinator that completed the round; empty if it was this one."""
    next_round: int = 0
    """The lowest number for the next round: another control plane used the lower numbers."""
    ended: RoundEnd | None = None
    """How the last round ended."""
    verdict: Verdict | None = None
    removed: tuple[RemovedNode, ...] = ()
    """The first few nodes that left since the last round was complete and were not replaced."""
    abandoned: AbandonedRendezvous = AbandonedRendezvous()
    max_restarts: int = -1
    """How many failures the job can survive, from its first node; -1 if unset."""
    programs: Mapping[str, str] = {}
    """The program of the first node of each role, for the first few roles."""
    size: NodeRange | None = None
    """Number of nodes in a round, if an operator changed it."""
    progress: JobProgress = JobProgress()
    quiet: AbstractSet[NodeId] = frozenset()
    """Nodes whose workers have long shown no activity in the running round."""

    @property
    def is_initial(self) -> bool:
        """Whether no node has joined yet, or all have left: the next node starts anew with its own settings."""
        return not (self.round or self.participants or self.wait_list or self.survivors)

    @property
    def is_preempted(self) -> bool:
        """Whether the job ends as soon as the workers of the running round have saved."""
        return self.preempted is not None and self.preempted.whole_job

    def runs(self, node: NodeId, round_: int) -> bool:
        """Whether this round is running and the node is in it."""
        return self.complete and not self.closed and self.round == round_ and node in self.participants

    def knows(self, node: NodeId) -> bool:
        """Whether the node is in any list."""
        return (
            node in self.participants
            or node in self.wait_list
            or node in self.redundancy_list
            or node in self.survivors
        )


def known_to(state: State) -> tuple[NodeId, ...]:
    """All nodes that are in any list, each once."""
    return (*state.participants, *state.wait_list, *state.redundancy_list, *state.survivors)


def number_known_to(state: State) -> int:
    """The number of nodes that are in any list."""
    return len(state.participants) + len(state.wait_list) + len(state.redundancy_list) + len(state.survivors)


DEFAULT_RUN_ID = "none"
"""The id of a job that sets none: two jobs can have it by mistake."""

_MAX_COMPARED = 64
"""Number of other nodes to compare a name with."""


def name_of(state: State, node: NodeId) -> str:
    """A node's readable name: its host, and its group rank if it has one or had one in the previous round.

    Adds the process id if another agent on a host of the same name is among the job's first few nodes: in a large job,
    searching all nodes for each name would take too long.
    """
    if node.is_placeholder:
        return str(node)
    place = state.participants.get(node)
    rank = state.survivors.get(node) if place is None else place.rank if state.complete else place.previous_rank
    called = str(node)
    others = itertools.islice(
        itertools.chain(state.participants, state.wait_list, state.redundancy_list, state.survivors), _MAX_COMPARED
    )
    apart = any((other.host or other.addr) == called and other != node for other in others)
    return f"{called}{f' pid {node.pid}' if apart else ''}{'' if rank is None else f' (rank {rank})'}"


def names_of(state: State, nodes: Collection[NodeId], most: int = 4) -> tuple[str, ...]:
    """Names of some nodes, at most `most`, and the number of remaining ones."""
    names = tuple(name_of(state, node) for node in itertools.islice(nodes, most))
    return names if len(nodes) <= most else (*names, f"{len(nodes) - most} more")


def nodes_waiting_alike(state: State, node: NodeId) -> Collection[NodeId]:
    """Nodes that wait in the same list as this one, including this one."""
    lists = (state.participants, state.wait_list, state.redundancy_list)
    return next((nodes for nodes in lists if node in nodes), (node,))


def join_names(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else "".join(names)


class Settings(NamedTuple):
    """The settings of a job's rendezvous. All times are in seconds.

    `fixed_ranks` makes each hint binding (static). `counts_heartbeats` keeps liveness in the state, for backends
    without sessions.
    """

    run_id: str
    min_nodes: int
    max_nodes: int
    join_timeout: float = 600.0
    last_call_timeout: float = 30.0
    close_timeout: float = 30.0
    heartbeat_timeout: float = 5.0
    keep_alive_interval: float = 5.0
    keep_alive_max_attempt: int = 3
    cas_backoff_max_seconds: float = 0.0
    """Maximum random pause after a lost race to write, for backends that nodes write to directly."""
    lease: float = 3.0
    fixed_ranks: bool = False
    counts_heartbeats: bool = False
    notice_timeout: float = 0.0
    """Seconds that workers have to acknowledge that a membership change will end the round; 0 for no notice."""
    min_healthy_time: float = 60.0
    """A shorter round counts as one without progress, if no node reports any. Only the following settings use this."""
    restart_backoff: float = 0.0
    """Delay of the first restart without progress; each later delay is twice as long."""
    restart_backoff_max: float = 300.0
    same_failure_limit: int = 0
    """How often in a row the same first failure can end a round without progress; 0 for any number."""
    retry_all: bool = False
    """Whether to treat a failure that no restart can fix like any other; otherwise it is retried once."""
    remote_control: bool = False
    """Whether an embedded coordinator without a secret accepts commands from other machines."""
    segment: int = 1
    """Number of nodes in one domain that get adjacent group ranks; divides `min_nodes` and `max_nodes`."""
    restart_window: float = 0.0
    """Seconds for which a failure uses up one of `restarts_in_window`; 0 if it uses up a restart for good."""
    restarts_in_window: int = 0


def recovery_timeout(settings: Settings) -> float:
    """Seconds that a new coordinator waits for the nodes of a job that it learned about.

    A few leases for the nodes to notice that the previous coordinator is gone, and a few seconds to find the new one.
    """
    return _LEASES * settings.lease + _CONNECT


_LEASES, _CONNECT = 3, 5.0


# The operations that a node can request, and how they complete.
#
# Join, exit, close and keep-alive are torch's (contract section 4.6); fail, succeed and drain are ours. A `deadline` is
# on the clock of the coordinator or shared-state link that runs the operation.


class Join(NamedTuple):
    """Take part in a round. Done when a round that includes this node is complete.

    `asked_at` is when the node requested it; `since` is the number of rendezvous abandoned before.
    """

    node_info: NodeInfo
    deadline: float = math.inf
    asked_at: float = 0.0
    since: int = 0


class Rejoin(NamedTuple):
    """Let all survivors of the ended round take part again, with these node infos, as if each had joined. Done when a
    round with them is complete.
    """

    node_infos: Mapping[NodeId, NodeInfo]


class Exit(NamedTuple):
    """Leave the job. `reason` distinguishes a departure from a loss noticed elsewhere; `detail` describes it.

    A node announces that it leaves before it stops its workers, and again when they have ended: `ended_with_0` if all
    exit codes were 0.
    """

    reason: Reason = Reason.DEPARTED
    detail: str = ""
    deadline: float = math.inf
    ended_with_0: bool = False


class Fail(NamedTuple):
    """Report that a worker of this node failed in `round`; the job may be restarted `max_restarts` times.

    `restarts_workers`: see `NodeInfo`.
    """

    round: int
    cause: Cause
    max_restarts: int
    restarts_workers: bool = False


class Succeed(NamedTuple):
    """Report that all workers of this node succeeded in `round`."""

    round: int


class Drain(NamedTuple):
    """End `round` cleanly because the membership will change; with `needs_consent`, once all its nodes agree."""

    round: int
    needs_consent: bool = False


class Preempt(NamedTuple):
    """Report that this node will be preempted in `seconds`, and takes no part in a round after `round`.

    `why`, if known: "is drained by ann@login".
    """

    round: int
    seconds: float
    why: str = ""


class PreemptJob(NamedTuple):
    """Report that the whole job will be preempted in `seconds`: it ends then, or once all workers have saved.

    `why` tells people how this node was notified, as in "received SIGUSR2"; or how `who` was, if this node only repeats
    the notice to a coordinator that may not have it.
    """

    seconds: float
    why: str = ""
    who: str = ""


class RecordProgress(NamedTuple):
    """Report that workers of this node reached `step` in `round`, which is new to the job as far as this node knows.

    `step` is -1 if they report progress without a number. With `made` false nothing is new: the operation only shows
    that this node reports progress or, after the round, how far its workers came.
    """

    round: int
    step: int = -1
    made: bool = True


class ReportQuiet(NamedTuple):
    """Report that no worker of this node has been active in `round` for a long time, or, without `quiet`, that one is
    active again. The node decides what a long time is."""

    round: int
    quiet: bool = True


class Close(NamedTuple):
    """End the job on request; `detail` describes the request."""

    deadline: float = math.inf
    detail: str = ""


class Restart(NamedTuple):
    """End `round` on an operator's request, without using up a restart."""

    round: int


class Resize(NamedTuple):
    """Change the number of nodes of future rounds."""

    size: NodeRange


class KeepLeaseAlive(NamedTuple):
    """Report that this node is alive."""

    deadline: float = math.inf


NodeOperation = Fail | Succeed | Drain | Preempt | PreemptJob | RecordProgress | ReportQuiet | Close
"""Operations that a node sends unchanged."""

Operation = NodeOperation | Join | Rejoin | Exit | Restart | Resize | KeepLeaseAlive


class NoChange(Enum):
    """Why `rules.step` changes nothing."""

    DONE = auto()
    WAIT = auto()
    """No step is possible now: retry when the state or the time changes."""


class Refusal(StrEnum):
    """Why an operation, usually a join, failed."""

    CLOSED = "closed"
    TIMEOUT = "timeout"
    RANK_TAKEN = "rank taken"
    SPARE_NOT_NEEDED = "spare not needed"
    ANOTHER_JOB = "another job"
