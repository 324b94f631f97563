"""Runs the election of one agent on a real etcd: one thread, which steps the machine and does what it says.

Laws:

1. All that happens is put into one queue, the answers to requests too; the thread takes one event after the other.
2. Whatever goes wrong here is an event for the machine, and the thread goes on: without it nobody would keep the lease,
   and nobody would know.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from random import Random
from typing import Any

from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.errors import RallypointError
from rallypoint.base.log import get_logger
from rallypoint.election import steps
from rallypoint.election.effects import EffectRunner
from rallypoint.election.keys import ElectionKeys
from rallypoint.election.leader_resolver import LeaderResolver
from rallypoint.election.machine import LONG_PAUSE, Election
from rallypoint.election.steps import Answer, CandidatePhase, Event
from rallypoint.election.term import LeaderTerm, Listen, start_term
from rallypoint.etcd.client import EtcdClient
from rallypoint.membership.state import NodeId, Settings

log = get_logger(__name__)


class Candidate:
    """This agent in etcd, from `start` to `close`."""

    def __init__(
        self,
        connect: Callable[[], EtcdClient],
        keys: ElectionKeys,
        settings: Settings,
        address: LeaderResolver,
        find_addresses: Callable[[], Sequence[str]],
        listen: Listen,
        own: NodeId,
    ) -> None:
        """Put the parts together.

        Args:
            connect: makes the client; called on the candidate's thread, since it costs imports.
            keys: of the job.
            settings: what the job asks of its rendezvous.
            address: what this node knows of the coordinator, shared with its link.
            find_addresses: those of this machine as others may reach it, the likeliest first; may look up names.
            listen: makes sockets on which others reach us at these addresses, all on one port.
            own: what this node calls itself, its address left out.
        """
        self._connect = connect
        self._keys = keys
        self._settings = settings
        self._address = address
        self._find_addresses = find_addresses
        self._listen = listen
        self._election = Election(keys, settings, own, Random())
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._client: EtcdClient
        self._effects: EffectRunner
        self._term: LeaderTerm | None = None
        address.on_news = self._on_link_news
        self._thread = threading.Thread(target=self._run, name="rallypoint-etcd", daemon=True)

    def start(self) -> None:
        """Stand for election; returns at once."""
        self._thread.start()

    @property
    def leads(self) -> bool:
        """Whether this agent is the coordinator."""
        return self._election.leads

    def close(self) -> None:
        """Give the coordinator's place to the next, and leave etcd; waits until that is done. Idempotent."""
        self._closed.set()
        self._inbox.put(steps.LeaveElection())
        if self._thread.is_alive():
            self._thread.join()

    # The thread

    def _run(self) -> None:
        try:
            self._client = self._connect()
        except RallypointError as error:
            self._address.set_permanent_error(str(error))
            return
        except Exception as error:
            log.exception("no client of etcd can be made")
            self._address.set_permanent_error(f"no client of etcd can be made ({type(error).__name__}: {error})")
            return
        self._effects = EffectRunner(self._client, self._address, self._inbox.put, _log)
        with closing(self._client):
            event: Event = steps.Tick()
            while self._take(event):
                event = self._next_event()
            self._end_term(steps.EndTerm(0.0))  # none is on, unless a step went wrong

    def _next_event(self) -> Event:
        at = self._election.wake_at
        try:
            return self._inbox.get(timeout=None if at == math.inf else max(0.0, at - SYSTEM_CLOCK.monotonic()))
        except queue.Empty:
            return steps.Tick()

    def _take(self, event: Event) -> bool:
        """Step the machine and do what it says; returns whether to go on."""
        try:
            for effect in self._election.step(event, SYSTEM_CLOCK.monotonic()):
                if isinstance(effect, steps.Ask):
                    self._ask(effect)
                else:
                    self._effects.do(effect)
        except Exception as error:  # law 2
            if isinstance(event, steps.Broken):
                log.exception("this agent's place in etcd cannot be given up either")
                if self._closed.wait(LONG_PAUSE):
                    return False
            self._inbox.put(steps.Broken(error))
        return self._election.phase is not CandidatePhase.GONE

    def _on_link_news(self) -> None:
        self._inbox.put(steps.LinkState(self._address.name, self._address.met, self._address.refusing_lease))

    # Requests

    def _ask(self, effect: steps.Ask) -> None:
        answer: Answer
        try:
            answer = self._REQUESTS[type(effect.request)](self, effect.request)
        except Exception as error:
            self._inbox.put(steps.Failed(effect.number, error))
        else:
            self._inbox.put(steps.Answered(effect.number, answer))

    def _txn(self, request: steps.Txn) -> Answer:
        return self._client.txn(
            request.compares, request.then, request.otherwise, repeatable=True, timeout_s=request.timeout_s
        )

    def _grant(self, request: steps.Grant) -> Answer:
        return self._client.lease_grant(request.ttl_s)

    def _keep_alive(self, request: steps.KeepLeaseAlive) -> Answer:
        return self._client.lease_keep_alive(request.lease, timeout_s=request.timeout_s)

    def _revoke(self, request: steps.Revoke) -> Answer:
        self._client.lease_revoke(request.lease, timeout_s=request.timeout_s)
        return None

    def _look_up(self, _request: steps.FindAddresses) -> Answer:
        return steps.Addresses(tuple(self._find_addresses()))

    def _start_term(self, request: steps.StartTerm) -> Answer:
        def deposed(why: str) -> None:
            self._inbox.put(steps.Deposed(request.number, why))

        self._end_term(steps.EndTerm(0.0))  # none is on, unless a step went wrong
        self._term, listening = start_term(
            self._client, self._keys, self._settings, request, deposed, self._listen, self._address.tls
        )
        self._effects.term = self._term
        return listening

    def _end_term(self, request: steps.EndTerm) -> Answer:
        term, self._term, self._effects.term = self._term, None, None
        if term is not None:
            term.close(request.linger_s)
        return None

    _REQUESTS: dict[type, Callable[[Candidate, Any], Answer]] = {  # noqa: RUF012 - a table, never changed
        steps.Txn: _txn,
        steps.Grant: _grant,
        steps.KeepLeaseAlive: _keep_alive,
        steps.Revoke: _revoke,
        steps.FindAddresses: _look_up,
        steps.StartTerm: _start_term,
        steps.EndTerm: _end_term,
    }


def _log(line: steps.WriteLog) -> None:
    log.log(line.level, line.text, *line.args, exc_info=line.error)
