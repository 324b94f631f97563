"""The rendezvous state: plain frozen data, the same for every backend.

Fields and lists are those of the contract's section 4.5, and ours: who took part in the round before, who has
succeeded, the ledger and the verdict. No field holds a time: moments are known only to the observer who saw them, on
its own clock (`observer`). What stands for them here are counters.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

from rallypoint.base.light_typing import NamedTuple
from rallypoint.failures.cause import Cause, Ending, Restarts


class NodeId(NamedTuple):
    """One agent of the job. Ordered as written; people read the name of its machine (`name_of` says more)."""

    addr: str
    pid: int
    local_id: int
    host: str = ""
    """The name of its machine, for people; empty if it is not known."""

    def __str__(self) -> str:
        return self.host or self.addr or f"the node of group rank {self.local_id}"

    @classmethod
    def placeholder(cls, rank: int) -> NodeId:
        """What stands for the node of a group rank that a new control plane has been told of and not heard itself."""
        return cls("", 0, rank)

    @property
    def is_placeholder(self) -> bool:
        """Whether this only stands for a node that has not been heard of yet."""
        return not self.addr


class NodeInfo(NamedTuple):
    """All that others need of a node, brought along when it joins, so that nothing is exchanged afterwards.

    `address` and `store_port` say where the worker store of this node listens, should it become group rank 0;
    `rank_hint` is the group rank that it asks for. `max_restarts` and `program` are what it was started with, -1 and
    empty if that is not said: of the first comes the job's number, and others are warned if theirs are not the same.
    `restarts_workers` says that not all workers that this node had in the round before can go on in their processes.
    """

    role: str
    local_world_size: int
    address: str
    store_port: int
    rank_hint: int | None = None
    max_restarts: int = -1
    program: str = ""
    restarts_workers: bool = False


class Participant(NamedTuple):
    """A member of the present round; its group rank counts from the moment the round is complete.

    `previous_rank` is the group rank that it held in the round before, None for a new node.
    """

    node_info: NodeInfo
    rank: int = 0
    previous_rank: int | None = None


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
    """The end of one round: which, why, by which node, and the failure if there was one.

    `node` is a name as people read it, empty if none is known; `detail` says more of the reason, where there is more.
    `missing_nodes` is how many nodes have to come before there can be another round. `restarts` holds
    how many restarts the job has used with the one that follows a failure.
    """

    round: int
    reason: Reason
    node: str
    cause: Cause | None = None
    detail: str = ""
    missing_nodes: int = 0
    restarts: Restarts = Restarts()
    held_back: float = 0.0
    """Seconds for which the next round is held back after a failure without progress."""


class RemovedNode(NamedTuple):
    """A node that was in and is no more, what it is called and why it went."""

    node: NodeId
    name: str
    reason: Reason


class AbandonedRendezvous(NamedTuple):
    """The last rendezvous that came to nothing because the time of a node was over that it could not do without.

    `number` counts them. `given_up_by` is that node, `seconds` how long it has waited. `joined`, `members` and
    `expected` say how far it had come: how many were in, a few of their names, and who was still to come, as far as
    that is known.
    """

    number: int = 0
    given_up_by: str = ""
    seconds: float = 0.0
    joined: int = 0
    members: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()


class Ledger(NamedTuple):
    """The job's one account of ended rounds, by cause. Only failures use up restarts."""

    failures: int = 0
    lost: int = 0
    departed: int = 0
    drained: int = 0
    requested: int = 0


class NodeRange(NamedTuple):
    """How many nodes a round has at least and at most."""

    min_nodes: int
    max_nodes: int


class FailureStreak(NamedTuple):
    """Failures in a row that ended a round without progress, and how often the last one has come back.

    `rank` and `line` are what the last failure is known by (`failure_streak_after`); a rank of -1 stands for none.
    """

    failures: int = 0
    repeats: int = 0
    rank: int = -1
    line: str = ""


class JobProgress(NamedTuple):
    """What nodes have told of the progress of their workers.

    `step` is the highest that was told, -1 for none; `round` the last round in which a new one was reached (or, where
    there are no numbers, anything new was written), -1 for none. `reported` says whether any node tells of progress: if
    so, nothing else counts as such.
    """

    step: int = -1
    round: int = -1
    reported: bool = False


class Preemption(NamedTuple):
    """A node that will be taken away so many seconds after it said so. With `whole_job` all are: `who` was told that,
    and `why` says how."""

    node: NodeId
    seconds: float
    whole_job: bool = False
    who: str = ""
    why: str = ""


class Outcome(StrEnum):
    """How a job ends."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class Verdict(NamedTuple):
    """The job's end, told to all; a failed job's carries the first failure, and `detail` why there is no restart left.

    An empty `detail` stands for the budget. `restarts` are those of a job that has failed, and `ending` is why it has;
    it means nothing for one that has succeeded. `delegate` is the node that does what one has to do for a job that was
    preempted (`--requeue`).
    """

    outcome: Outcome
    cause: Cause | None = None
    detail: str = ""
    restarts: Restarts = Restarts()
    ending: Ending = Ending.PROGRAM
    delegate: NodeId | None = None


class State(NamedTuple):
    """What all nodes agree on. Replaced, never changed."""

    round: int = 0
    complete: bool = False
    last_call: int = 0
    """Which last call is running, 0 for none; each new one has a number of its own."""
    last_calls: int = 0
    """How many last calls there have been."""
    closed: bool = False
    participants: Mapping[NodeId, Participant] = {}
    wait_list: Mapping[NodeId, NodeInfo] = {}
    redundancy_list: Mapping[NodeId, NodeInfo] = {}
    survivors: Mapping[NodeId, int] = {}
    """Who took part in the round before, lives, and has not come back yet, with the group rank held there."""
    succeeded: frozenset[NodeId] = frozenset()
    finished: Mapping[NodeId, Participant] = {}
    """Who has succeeded in the round that runs and has left: who hears late of its place counts them."""
    heartbeats: Mapping[NodeId, int] = {}
    """How often each node has said that it lives. Used where no session shows it."""
    ledger: Ledger = Ledger()
    consents: frozenset[NodeId] = frozenset()
    """Who agrees that the round ends, where the workers are asked first."""
    preempted: Preemption | None = None
    """Who was last to say that it will be taken away in this round, or first to say that the whole job will be."""
    failure_streak: FailureStreak = FailureStreak()
    restart_delay: float = 0.0
    """Seconds for which the round that forms is held back, counted from when it began to form."""
    restarts: int = 0
    """How many restarts the job had used when this round was complete: what its workers are told."""
    origin: str = ""
    """Who completed the round that was taken over from a coordinator before; empty if that was none."""
    next_round: int = 0
    """The next round has at least this number: lower ones were used under another control plane."""
    ended: RoundEnd | None = None
    """How the last round ended."""
    verdict: Verdict | None = None
    removed: tuple[RemovedNode, ...] = ()
    """The first few nodes that have left since the last round was complete, without another in their place."""
    abandoned: AbandonedRendezvous = AbandonedRendezvous()
    max_restarts: int = -1
    """How many failures the job survives, as its first node was started; -1 if that was not said."""
    programs: Mapping[str, str] = {}
    """What the first node of each role runs, for the first few roles."""
    size: NodeRange | None = None
    """How many nodes rounds have, where an operator has changed that."""
    progress: JobProgress = JobProgress()
    quiet: frozenset[NodeId] = frozenset()
    """Whose workers have given no sign of life for long in the round that runs."""

    @property
    def is_initial(self) -> bool:
        """Whether nobody is in yet, or no more: who comes now begins, and is held to nothing that others said."""
        return not (self.round or self.participants or self.wait_list or self.survivors)

    @property
    def is_preempted(self) -> bool:
        """Whether the job ends as soon as the workers of the round that runs have saved."""
        return self.preempted is not None and self.preempted.whole_job

    def runs(self, node: NodeId, round_: int) -> bool:
        """Whether this round runs, with the node in it."""
        return self.complete and not self.closed and self.round == round_ and node in self.participants

    def knows(self, node: NodeId) -> bool:
        """Whether the node stands in any list."""
        return (
            node in self.participants
            or node in self.wait_list
            or node in self.redundancy_list
            or node in self.survivors
        )


def known_to(state: State) -> tuple[NodeId, ...]:
    """All nodes that stand in any list, each once."""
    return (*state.participants, *state.wait_list, *state.redundancy_list, *state.survivors)


_MAX_COMPARED = 64
"""With how many nodes the name of one is compared."""


def name_of(state: State, node: NodeId) -> str:
    """What people call a node: its host, and its group rank if it has or had one in the round before.

    The process id comes in between where another agent of the job runs on a host of the same name, if that is among the
    first few nodes: in a large job nobody is asked to look through all of them for each name.
    """
    if node.is_placeholder:
        return str(node)
    place = state.participants.get(node)
    rank = state.survivors.get(node) if place is None else place.rank if state.complete else place.previous_rank
    called = str(node)
    others = itertools.islice(
        itertools.chain(state.participants, state.wait_list, state.redundancy_list, state.survivors), _MAX_COMPARED
    )
    apart = any((each.host or each.addr) == called and each != node for each in others)
    return f"{called}{f' pid {node.pid}' if apart else ''}{'' if rank is None else f' (rank {rank})'}"


def names_of(state: State, nodes: Collection[NodeId], most: int = 4) -> tuple[str, ...]:
    """The names of some nodes: at most so many, and how many more there are."""
    names = tuple(name_of(state, each) for each in itertools.islice(nodes, most))
    return names if len(nodes) <= most else (*names, f"{len(nodes) - most} more")


def nodes_waiting_alike(state: State, node: NodeId) -> Collection[NodeId]:
    """The nodes that wait in the same list as this one, itself counted."""
    lists = (state.participants, state.wait_list, state.redundancy_list)
    return next((each for each in lists if node in each), (node,))


def join_names(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else "".join(names)


class Settings(NamedTuple):
    """What the job asks of its rendezvous. All times are in seconds.

    `fixed_ranks` makes each hint binding (static). `counts_heartbeats` has liveness kept in the state, for backends
    that have no sessions.
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
    lease: float = 3.0
    fixed_ranks: bool = False
    counts_heartbeats: bool = False
    notice_timeout: float = 0.0
    """How long workers have to acknowledge that the round is to end for a change of membership; 0 does not ask them."""
    min_healthy_time: float = 60.0
    """A round that ran for less has made no progress, where no node tells of it. Matters to the three below only."""
    restart_backoff: float = 0.0
    """How long the first restart without progress is held back; each further one twice as long as the one before."""
    restart_backoff_max: float = 300.0
    same_failure_limit: int = 0
    """So many times in a row may the same first failure end a round without progress; 0 for any number."""
    remote_control: bool = False
    """Whether a coordinator among the nodes takes commands from other machines where there is no secret."""
