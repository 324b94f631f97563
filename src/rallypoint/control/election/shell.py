"""Runs the election of one agent on a real etcd: one thread, which steps the machine and executes its effects.

Laws:

1. All events go into one queue, including the answers to requests; the thread takes one after the other.
2. Any error here is an event for the machine, and the thread goes on: without it the lease would not be kept, and no
   one would notice.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from random import Random
from typing import TYPE_CHECKING

from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.errors import RallypointError
from rallypoint.base.log import get_logger
from rallypoint.control.election import steps
from rallypoint.control.election.effects import EffectRunner
from rallypoint.control.election.keys import ElectionKeys
from rallypoint.control.election.leader_resolver import LeaderResolver
from rallypoint.control.election.machine import LONG_PAUSE, Election
from rallypoint.control.election.steps import Answer, CandidatePhase, Event
from rallypoint.control.election.term import LeaderTerm, Listen, start_term
from rallypoint.control.etcd.client import EtcdClient
from rallypoint.control.membership.state import NodeId, Settings

if TYPE_CHECKING:
    from rallypoint.control.protocol.observation import Snapshot

log = get_logger(__name__)


class Candidate:
    """This agent in etcd, from `start` to `close`."""

    def __init__(
        self,
        connect: Callable[[], EtcdClient],
        keys: ElectionKeys,
        settings: Settings,
        resolver: LeaderResolver,
        find_addresses: Callable[[], Sequence[str]],
        listen: Listen,
        own: NodeId,
    ) -> None:
        """Put the parts together.

        Args:
            connect: makes the client; called on the candidate's thread, since it costs imports.
            keys, settings: of the job.
            resolver: what this node knows of the coordinator, shared with its link.
            find_addresses: those of this machine as others may reach it, the likeliest first; may look up names.
            listen: opens sockets at these addresses, all on one port.
            own: what this node calls itself, its address left out.
        """
        self._connect = connect
        self._keys = keys
        self._settings = settings
        self._resolver = resolver
        self._find_addresses = find_addresses
        self._listen = listen
        self._election = Election(keys, settings, own, Random())
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._client: EtcdClient
        self._effects: EffectRunner
        self._term: LeaderTerm | None = None
        resolver.on_news = self._on_link_news
        self._thread = threading.Thread(target=self._run, name="rallypoint-etcd", daemon=True)

    def start(self) -> None:
        """Stand for election; returns at once."""
        self._thread.start()

    @property
    def leads(self) -> bool:
        """Whether this agent is the coordinator."""
        return self._election.leads

    def snapshot(self) -> Snapshot | None:
        """The snapshot of the job, if this agent is the coordinator; from any thread."""
        term = self._term
        return None if term is None else term.snapshot()

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
            self._resolver.set_permanent_error(str(error))
            return
        except Exception as error:
            log.exception("no client of etcd can be made")
            self._resolver.set_permanent_error(f"no client of etcd can be made ({type(error).__name__}: {error})")
            return
        self._effects = EffectRunner(self._client, self._resolver, self._inbox.put, _log)
        with closing(self._client):
            event: Event = steps.Tick()
            while self._take(event):
                event = self._next_event()
            self._end_term(0.0)  # none is on, unless a step went wrong

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
                elif isinstance(effect, steps.NodesLost):
                    if self._term is not None:
                        self._term.nodes_lost(effect.nodes, effect.detail)
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
        self._inbox.put(steps.LinkState(self._resolver.name, self._resolver.met, self._resolver.refusing_lease))

    # Requests

    def _ask(self, effect: steps.Ask) -> None:
        try:
            answer = self._do(effect.request)
        except Exception as error:
            self._inbox.put(steps.Failed(effect.number, error))
        else:
            self._inbox.put(steps.Answered(effect.number, answer))

    def _do(self, request: steps.Request) -> Answer:
        client = self._client
        match request:
            case steps.Txn(compares, then, otherwise, timeout_s):
                return client.txn(compares, then, otherwise, timeout_s=timeout_s)
            case steps.Grant(ttl_s):
                return client.lease_grant(ttl_s)
            case steps.KeepLeaseAlive(lease, timeout_s):
                return client.lease_keep_alive(lease, timeout_s=timeout_s)
            case steps.Revoke(lease, timeout_s):
                client.lease_revoke(lease, timeout_s=timeout_s)
            case steps.FindAddresses():
                return steps.Addresses(tuple(self._find_addresses()))
            case steps.StartTerm():
                return self._start_term(request)
            case steps.EndTerm(linger_s):
                self._end_term(linger_s)
        return None

    def _start_term(self, request: steps.StartTerm) -> steps.Listening:
        def deposed(why: str) -> None:
            self._inbox.put(steps.Deposed(request.number, why))

        self._end_term(0.0)  # none is on, unless a step went wrong
        self._term, listening = start_term(
            self._client, self._keys, self._settings, request, deposed, self._listen, self._resolver.tls
        )
        return listening

    def _end_term(self, linger_s: float) -> None:
        term, self._term = self._term, None
        if term is not None:
            term.close(linger_s)


def _log(line: steps.WriteLog) -> None:
    log.log(line.level, line.text, *line.args, exc_info=line.error)
