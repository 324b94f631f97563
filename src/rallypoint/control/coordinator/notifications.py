"""Creates notifications to nodes: about changes of the state, and about the state on request. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from rallypoint.base.endpoint import is_loopback
from rallypoint.control.membership.mappings import tally
from rallypoint.control.membership.rules import ClockView, assign_worker_ranks, is_settled, number_fitting, starts_at
from rallypoint.control.membership.state import (
    Join,
    NodeId,
    Outcome,
    Reason,
    Refusal,
    RoundEnd,
    Settings,
    State,
    Verdict,
    join_names,
    name_of,
    names_of,
    number_known_to,
)
from rallypoint.control.protocol.messages import (
    JobEnded,
    JoinRefused,
    LeaveReply,
    MissingNode,
    NodesSucceeded,
    NodesWaiting,
    Notification,
    Placement,
    Preempted,
    Progress,
    RoundEnded,
)
from rallypoint.failures.cause import Cause, Ending


def notification_diff(
    before: State, after: State, *, keeps_places: bool = False
) -> list[tuple[Collection[NodeId], Notification]]:
    """The notifications due after a change of the state, except placements, waiting nodes and the job's end.

    Rounds in between may be missing. `keeps_places`: see `RoundEnded.keeps_place`.
    """
    due: list[tuple[Collection[NodeId], Notification]] = []
    if after.round > before.round:
        # A node that succeeded and then became unreachable lost its place, but is still waiting for the others.
        others = sorted(node for node in before.succeeded if node not in before.participants)
        due.append(([*before.participants, *others], RoundEnded(_round_end(before, after), keeps_places)))
    notice = after.preempted
    if notice is not None and (notice != before.preempted or after.round != before.round):
        notified = [node for node in after.participants if notice.whole_job or node != notice.node]
        due.append((notified, preempted(after)))
    return due


def preempted(state: State) -> Preempted:
    """The notification to running nodes that a node, or all nodes, will be preempted."""
    notice = state.preempted
    assert notice is not None, "somebody will be taken away"
    return Preempted(
        state.round, notice.who or name_of(state, notice.node), notice.seconds, notice.whole_job, notice.why
    )


def newly_complete(before: State, after: State) -> bool:
    """Whether the round of `after` is complete, was not complete in `before`, and its nodes must start it."""
    return after.complete and not after.is_preempted and (not before.complete or after.round > before.round)


def _round_end(before: State, after: State) -> RoundEnd:
    """How the round of `before` ended, as far as `after` shows."""
    ended = after.ended
    if ended is not None and ended.round == before.round:
        return ended
    return RoundEnd(before.round, Reason.LOST if ended is None else ended.reason, "" if ended is None else ended.node)


def end_notifications(state: State, verdict: Verdict) -> tuple[Notification, dict[NodeId, Notification]]:
    """The notification at the job's end, and different ones for a few nodes; each is created once.

    After a success a spare learns that it was not needed; otherwise it ends as the job did.
    """
    spare: Notification = JobEnded(verdict, is_spare=True)
    if verdict.outcome is Outcome.SUCCEEDED:
        spare = JoinRefused(Refusal.SPARE_NOT_NEEDED, f"the job has {verdict.outcome.value}")
    others: dict[NodeId, Notification] = dict.fromkeys(state.redundancy_list, spare)
    if verdict.delegate is not None:
        others[verdict.delegate] = JobEnded(verdict, is_delegate=True)
    return JobEnded(verdict), others


def nodes_waiting(state: State) -> NodesWaiting:
    """The notification to running nodes about waiting nodes."""
    return NodesWaiting(state.round, len(state.wait_list), names_of(state, state.wait_list))


_MAX_RANGES = 1000


def nodes_succeeded(state: State) -> NodesSucceeded:
    """The notification to running nodes about nodes that succeeded; in an unusual job, only the first few thousand."""
    places = (state.participants.get(node) or state.finished.get(node) for node in state.succeeded)
    ranges: list[tuple[int, int]] = []
    for rank in sorted(place.rank for place in places if place is not None):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], rank
        else:
            ranges.append((rank, rank))
    return NodesSucceeded(state.round, tuple(ranges[:_MAX_RANGES]))


def placements(state: State, origin: str = "", control_rank: int = -1, host: str = "") -> dict[NodeId, Placement]:
    """Every participant's placement in a complete round, the same for nodes that are notified late.

    `origin` and `control_rank`: see `Placement`. `host` is the address that nodes on other machines use for the
    coordinator. It replaces a loopback address, which may be all that the node in the coordinator's process knows about
    itself.
    """
    in_order = sorted((*state.participants.items(), *state.finished.items()), key=lambda entry: entry[1].rank)
    ranks = assign_worker_ranks(
        [(participant.node_info.role, participant.node_info.local_world_size) for _, participant in in_order]
    )
    first = in_order[0][1].node_info
    address = host if host and is_loopback(first.address) else first.address
    restart_workers = any(participant.node_info.restarts_workers for _, participant in in_order)
    return {
        node: Placement(
            round=state.round,
            group_rank=participant.rank,
            group_world_size=len(in_order),
            ranks=own,
            store_address=address,
            store_port=first.store_port,
            restarts=state.restarts,
            control_rank=control_rank,
            origin=origin,
            max_restarts=state.max_restarts,
            progress=state.progress.step,
            size=state.size,
            restart_workers=restart_workers,
        )
        for (node, participant), own in zip(in_order, ranks, strict=True)
        if node in state.participants
    }


def progress(
    state: State, node: NodeId, settings: Settings, view: ClockView, *, ends_in: float = -1.0, reports: bool = True
) -> Progress:
    """The progress of the rendezvous, seen by `node`. For `ends_in` and `reports` see `Progress`."""
    from rallypoint.control.membership.endings import hosts_of, missing

    common = Progress(
        round=state.round,
        complete=state.complete,
        joined=len(state.participants) if state.complete else number_fitting(state, settings),
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        expected=missing(state, settings),
        spare=False,
        backoff=state.restart_delay,
        members=hosts_of(state.participants),
        segment=settings.segment,
    )
    return progress_for(common, state, node, settings, view, ends_in=ends_in, reports=reports)


def progress_for(
    common: Progress, state: State, node: NodeId, settings: Settings, view: ClockView, *, ends_in: float, reports: bool
) -> Progress:
    """The progress as `node` sees it, from another node's progress in the same state."""
    starts = is_settled(state, settings) and node in state.participants
    return common._replace(
        spare=node in state.redundancy_list,
        removed=missing_nodes(state, view),
        starts_in=max(0.0, starts_at(state, view, settings) - view.now) if starts else -1.0,
        ends_in=-1.0 if starts else ends_in,
        reports=reports,
    )


def abandoned_progress(state: State, settings: Settings, view: ClockView, *, reports: bool = True) -> Progress:
    """The progress of the last abandoned rendezvous."""
    last = state.abandoned
    return Progress(
        round=state.round,
        complete=False,
        joined=last.joined,
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        expected=last.expected,
        spare=False,
        members=last.members,
        segment=settings.segment,
        removed=missing_nodes(state, view),
        gave_up_by=last.given_up_by,
        waited=last.seconds,
        reports=reports,
    )


def missing_nodes(state: State, view: ClockView) -> tuple[MissingNode, ...]:
    """The first few nodes that left since the last complete round and were not replaced."""
    pairs = zip(state.removed, view.removed_at, strict=False)
    return tuple(
        MissingNode(removed.name, removed.reason, view.now - at, removed.ended_with_0) for removed, at in pairs
    )


def placeholders_in(state: State) -> int:
    """Number of places whose nodes have not reported to this coordinator."""
    return sum(tally(nodes, _is_placeholder).get(True, 0) for nodes in (state.participants, state.survivors))


def standing_without(state: State, node: NodeId, settings: Settings, placeholders: int) -> LeaveReply:
    """The reply to a node that left: whether a round is running, or enough nodes are left for one."""
    others = number_known_to(state) - placeholders - state.knows(node)
    goes_on = not state.closed and others > 0 and (state.complete or others >= settings.min_nodes)
    return LeaveReply(goes_on, others, None if state.verdict is None else state.verdict.outcome)


def _is_placeholder(node: NodeId, _held: object) -> bool:
    return node.is_placeholder


def join_refusal(
    refusal: Refusal, join: Join, node: NodeId, before: State, after: State, settings: Settings, view: ClockView
) -> JoinRefused | JobEnded:
    """The notification for a node whose join failed.

    Reports the progress in `before`, the state before the last steps, in which the node still counted.
    """
    if refusal is Refusal.RANK_TAKEN:
        return JoinRefused(refusal, f"rank {join.node_info.rank_hint}")
    if after.verdict is not None and after.verdict.ending is Ending.PREEMPTED:
        return JobEnded(after.verdict)
    if after.closed:
        return JoinRefused(refusal, _end_of_job(after))
    own = name_of(before, node)
    if join.since != after.abandoned.number:
        how_far = abandoned_progress(after, settings, view, reports=own == after.abandoned.given_up_by)
    else:
        waited = view.now - join.asked_at
        how_far = progress(before, node, settings, view)._replace(gave_up_by=own, waited=waited)
    return JoinRefused(refusal, "", how_far)


def _end_of_job(state: State) -> str:
    verdict = state.verdict
    if verdict is None:
        return "it was closed"
    if verdict.outcome is Outcome.FAILED and verdict.cause is not None:
        return f"it has failed: {verdict.cause.headline}"
    return f"it has {verdict.outcome.value}"


# The history of a job, for watchers. Each change of the state costs only a comparison of a few fields, for any number
# of nodes. No messages (`observation`) are created from it before there is a watcher.


MAX_EVENTS, MAX_FAILURES = 200, 20
"""Maximum number of events and failures stored; the newest are stored."""

Event = tuple[float, int, str, int, str, str]
"""Time, number, kind (an `EventKind` of watchers), round, sentence, and the node concerned."""
Failure = tuple[float, int, str, Cause | None, str]
"""Time, round, node, cause (None for a failure of the node itself), and how it was lost."""


class JobHistory:
    """The newest events and failures of one job, and the start of its current phase."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self.failures: deque[Failure] = deque(maxlen=MAX_FAILURES)
        self.phase_since: float | None = None
        """When a round last began to form or run, or ended, or the job ended; None before the first such event."""
        self.began: float | None = None
        """When the first such event happened, here or, as a node reported, under another coordinator."""
        self.known = ("", "")
        """The command that started group rank 0's agent, and its log folder, as last reported."""
        self.is_later = False
        """Whether the job had another coordinator before."""
        self._number = 0

    def record(self, before: State, after: State, now: float) -> None:
        """Record a change of the state."""
        same = (before.round, before.complete, before.closed) == (after.round, after.complete, after.closed)
        if self.phase_since is None or not same:
            self._enter_phase(now)
        if before.round != after.round and before.complete and after.ended is not None:
            self._record_round_end(after.ended, now)
        if after.complete and (not before.complete or before.round != after.round):
            self.add("round started", after.round, _round_start(after), now)
        if after.is_preempted and not before.is_preempted and after.preempted is not None:
            text = f"{after.preempted.who} {after.preempted.why}: the job is being preempted"
            self.add("job preempted", after.round, text, now, after.preempted.who)
        if after.verdict is not None and before.verdict is None:
            self._record_verdict(after.verdict, after.round, now)

    def nodes_gone(self, names: Collection[str], more: int, reason: Reason, round_: int, now: float) -> None:
        """Record that these nodes, and `more` others, left or were lost while a round formed."""
        for name in names:
            self.add("node lost", round_, f"{name}: {reason.value}", now, name)
        if more:
            self.add("node lost", round_, f"{more} more nodes: {reason.value}", now)

    def nodes_waiting(self, before: Collection[NodeId], state: State, now: float) -> None:
        """Record that more nodes are waiting for the next round than `before`."""
        came = [node for node in state.wait_list if node not in before]
        if came:
            text = f"{join_names(names_of(state, came))} {'is' if len(came) == 1 else 'are'} waiting for the next round"
            self.add("node waiting", state.round, text, now)

    def taken_over(self, before: State, state: State, now: float) -> None:
        """Record that a coordinator continues from an earlier one or a node's report; that state's age is unknown."""
        if (before.round, before.complete, before.closed) == (state.round, state.complete, state.closed):
            return
        self._enter_phase(now)
        self.is_later = True
        runs = f"round {state.round} is {'running' if state.complete else 'forming'}"
        how = runs if state.verdict is None else verdict_sentence(state.verdict)
        self.add("coordinator started", state.round, f"another coordinator took over: {how}", now)

    def reported(self, age: float, command: str, log_folder: str, now: float) -> None:
        """Record how many seconds a node has been in the job; group rank 0 also reports the rest."""
        if self.is_later and self.began is not None:
            self.began = min(self.began, now - age)
        if command:
            self.known = command, log_folder

    def add(self, kind: str, round_: int, text: str, now: float, node: str = "") -> None:
        """Record an event; `text` is one sentence."""
        self._number += 1
        self.events.append((now, self._number, kind, round_, text, node))

    def _enter_phase(self, now: float) -> None:
        self.phase_since = now
        self.began = now if self.began is None else self.began

    def _record_round_end(self, end: RoundEnd, now: float) -> None:
        if end.cause is not None:
            self.failures.append((now, end.round, end.node, end.cause, ""))
        elif end.reason is Reason.LOST:
            self.failures.append((now, end.round, end.node, None, end.detail or end.reason.value))
        why = end.cause.headline if end.cause is not None else end.detail
        who = f": {end.node}" if end.node else ""
        text = f"round {end.round} ended{who}: {end.reason.value}{f' ({why})' if why else ''}"
        self.add("round ended", end.round, text, now, end.node)

    def _record_verdict(self, verdict: Verdict, round_: int, now: float) -> None:
        if verdict.outcome is Outcome.FAILED and verdict.cause is not None:
            self.failures.append((now, round_, verdict.cause.host, verdict.cause, ""))
        self.add("job ended", round_, verdict_sentence(verdict), now)


def _round_start(state: State) -> str:
    """Describe a round's start: the number of nodes, and the new ones, such as a spare."""
    count = len(state.participants)
    came = (
        [node for node, participant in state.participants.items() if participant.previous_rank is None]
        if state.round
        else []
    )
    new = f", new: {', '.join(names_of(state, came))}" if came else ""
    return f"round {state.round} started with {count} node{'' if count == 1 else 's'}{new}"


def verdict_sentence(verdict: Verdict) -> str:
    """Describe how the job ended."""
    why = verdict.detail or ("" if verdict.cause is None else verdict.cause.headline)
    return f"the job has {verdict.outcome.value}{f': {why}' if why else ''}"
