"""Keeps what this node knows about a failure, in a folder for later inspection (`--incident-dir`, `rallyctl bundle`).

Laws:

1. Nothing here runs, and nothing is imported, unless a folder was given or an operator asks.
2. The agent's loop never waits for it: each incident has a thread of its own, and the end of the run waits for
   them for `_FINISH` seconds at most.
3. Stacks are collected at once, before workers end on SIGTERM; output is read when they have ended.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from rallypoint.agent.incident_files import (
    Incident,
    NodeFacts,
    index_fields,
    node_facts,
    pieces_of,
    stack_pieces,
    summary_of,
)
from rallypoint.agent.policy_state import Phase, PolicyState
from rallypoint.base.clock import Deadline
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.base.process_table import signal_process
from rallypoint.failures.cause import Ending
from rallypoint.membership.operations import Refusal
from rallypoint.membership.state import Outcome, Reason, Verdict
from rallypoint.observe.bundle import LIMIT, ON_DEMAND_LIMIT, Piece, bundle, safe_name, write_bundle, write_index
from rallypoint.protocol.messages import JobEnded, JoinRefused, LinkLost, RoundEnded

if TYPE_CHECKING:
    from rallypoint.agent.controller import WorkerController
    from rallypoint.agent.steps import Event
    from rallypoint.protocol.observation import Snapshot

log = get_logger(__name__)

_ENDED = 12.0
"""Seconds to wait for the end of workers before their output is read anyway."""
_FINISH = 20.0
"""Seconds that the end of a run waits for incidents that are being written."""
MAX_KEPT = 20
"""Bundles that one agent keeps: the first ones, since later failures are mostly repetitions."""


_STARTED = frozenset({Phase.RUNNING, Phase.BROKEN, Phase.FINISHED})


def incident_of(event: Event, state: PolicyState) -> Incident | None:
    """The failure that an event of the agent's loop stands for, in the state before it; None for other events."""
    rule = _RULES.get(type(event))
    return None if rule is None else rule(event, state)


def _of_round_end(event: RoundEnded, state: PolicyState) -> Incident | None:
    end = event.end
    if end.reason not in {Reason.FAILURE, Reason.LOST} or state.phase not in _STARTED or end.round != state.round:
        return None
    return Incident(end.round, end.reason.value, f"{end.node}: {end.detail}".strip(": "), False, end.cause)


def _of_job_end(event: JobEnded, state: PolicyState) -> Incident | None:
    verdict: Verdict = event.verdict
    if verdict.outcome is not Outcome.FAILED:
        return None
    why = verdict.ending if verdict.ending is not Ending.PROGRAM else Reason.FAILURE
    return Incident(state.round, why.value, verdict.detail, True, verdict.cause)


def _of_refusal(event: JoinRefused, state: PolicyState) -> Incident | None:
    if state.phase is not Phase.FORMING or event.refusal is not Refusal.TIMEOUT:
        return None
    return Incident(state.round, "the rendezvous timed out", event.detail, True)


def _of_lost_link(event: LinkLost, state: PolicyState) -> Incident | None:
    if state.phase in {Phase.FINISHED, Phase.ENDING, Phase.LEAVING, Phase.ENDED}:
        return None
    failure = state.failure or (state.held_failure and state.held_failure.cause)
    return Incident(state.round, "the control plane was lost", event.detail, True, failure or None)


_RULES: Mapping[type, Callable[..., Incident | None]] = {
    RoundEnded: _of_round_end,
    JobEnded: _of_job_end,
    JoinRefused: _of_refusal,
    LinkLost: _of_lost_link,
}


class IncidentRecorder:
    """Keeps the incidents of one agent's run.

    Args:
        folder: the folder to write to; made if it is missing.
        facts: returns what is known about this node and its workers at this moment; called on the loop's thread.
        snapshot: returns the state of the job, if the coordinator is in this process; else None.
    """

    def __init__(
        self, folder: str, facts: Callable[[], NodeFacts], snapshot: Callable[[], Snapshot | None] = lambda: None
    ) -> None:
        self._folder = folder
        self._facts = facts
        self._snapshot = snapshot
        self._threads: list[threading.Thread] = []
        self._count = 0

    def look_at(self, event: Event, state: PolicyState) -> None:
        """Handle an event: begin to write what is known, if it is a failure. Returns at once."""
        incident = incident_of(event, state)
        if incident is None:
            return
        self._count += 1
        if self._count > MAX_KEPT:
            if self._count == MAX_KEPT + 1:
                log.warning("this agent has kept %d incidents; later ones are not kept", MAX_KEPT)
            return
        facts = self._facts()
        arguments = incident, facts, self._snapshot()
        thread = threading.Thread(target=self._keep, args=arguments, name="incident", daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Wait for incidents that are being written."""
        deadline = Deadline.after(_FINISH)
        for thread in self._threads:
            thread.join(max(0.0, deadline.remaining()))
        if any(thread.is_alive() for thread in self._threads):
            log.warning("the evidence of a failure could not be collected within %g s", _FINISH)

    def _keep(self, incident: Incident, facts: NodeFacts, seen: Snapshot | None) -> None:
        try:
            parent = os.path.join(self._folder, safe_name(facts.job), f"round-{max(incident.round, 0)}")
            stacks = stack_pieces(facts)
            if seen is not None:  # the coordinator is here: the state of the job, over all nodes
                write_index(parent, index_fields(seen, incident.why, incident.headline, facts.host))
            _until_ended(facts)
            pieces = bundle(summary_of(incident, facts), [*stacks, *pieces_of(facts, incident)], LIMIT)
            path = write_bundle(parent, f"{safe_name(facts.host)}-{facts.pid}", pieces)
        except OSError as error:
            log.error("the evidence of this failure cannot be saved in %s: %s", self._folder, error.strerror or error)
        except Exception:
            log.exception("the evidence of this failure could not be saved: a defect of Rallypoint, please report it")
        else:
            log.warning("this node's evidence of the failure is in %s", os.path.abspath(path))


def record_incidents(workers: WorkerController, folder: str) -> None:
    """Make an agent keep the incidents of its run in a folder."""
    workers.incidents = IncidentRecorder(folder, partial(node_facts, workers), workers.rendezvous.snapshot)


def _until_ended(facts: NodeFacts) -> None:
    """Wait until the workers have ended, but at most for the time that they have."""
    until = time.monotonic() + _ENDED
    for worker in facts.workers:
        fd = None if worker.process is None else signal_process(worker.process)
        if fd is None:  # it has ended already; its pid may be another's by now
            continue
        try:
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            poller.poll(max(0.0, until - time.monotonic()) * 1000)
        finally:
            os.close(fd)


def demand(facts: NodeFacts) -> tuple[Piece, ...]:
    """The bundle that an operator has requested: the same for a node whose workers run, in less space."""
    asked = Incident(facts.round, "an operator asked", "", False)
    return bundle(summary_of(asked, facts), [*stack_pieces(facts), *pieces_of(facts, asked)], ON_DEMAND_LIMIT)
