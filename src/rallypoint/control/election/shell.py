"""Runs one agent's election on a real etcd: one thread steps the machine and executes its effects.

Laws:

1. All events go into one queue, including the answers to requests; the thread handles one after the other.
2. Any error here is an event for the machine, and the thread continues: without it, the lease would end unnoticed.

`EffectRunner` handles the effects without waiting and without a term (watches, news for the link, log lines).
"""

from __future__ import annotations

import math
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.descriptors import allow_nodes
from rallypoint.base.endpoint import host_name
from rallypoint.base.errors import RallypointError
from rallypoint.base.log import get_logger
from rallypoint.control.coordinator.dispatcher import Dispatcher, RestoredState
from rallypoint.control.coordinator.leader_lease import LeaderLease
from rallypoint.control.coordinator.server import ControlServer
from rallypoint.control.election import steps
from rallypoint.control.election.journal import Journal
from rallypoint.control.election.journal_writer import JournalWriter
from rallypoint.control.election.keys import ElectionKeys
from rallypoint.control.election.leader_resolver import LeaderResolver
from rallypoint.control.election.machine import LONG_PAUSE, Election
from rallypoint.control.election.steps import Answer, CandidatePhase, Effect, Event, Listening, StartTerm, Watched
from rallypoint.control.etcd.api import WatchEnd, WatchEvent
from rallypoint.control.etcd.client import EtcdClient
from rallypoint.control.membership.state import NodeId, Settings

if TYPE_CHECKING:
    import socket


log = get_logger(__name__)

Listen: TypeAlias = "Callable[[Sequence[str]], list[socket.socket]]"

_LAST_WRITES = 1.0
"""Seconds for a coordinator's last writes."""


_DIVERGES = (
    "in etcd %s, a killed member can lose a change permanently (etcd-io/etcd#13766), and then no coordinator can be "
    "found; use a later version"
)


class _Term(NamedTuple):
    """This agent's term as the coordinator."""

    dispatcher: Dispatcher
    writer: JournalWriter
    server: ControlServer


class Watcher(Protocol):
    """The part of the etcd client that watches keys."""

    def watch(
        self,
        key: bytes,
        from_revision: int,
        on_events: Callable[[Sequence[WatchEvent]], None],
        on_lost: Callable[[WatchEnd], None],
        *,
        prefix: bool = True,
    ) -> Any: ...


class EffectRunner:
    """Runs one candidate's effects. The value of the leader's key goes to the link at once, even during a request of
    the election."""

    def __init__(
        self,
        watcher: Watcher,
        resolver: LeaderResolver,
        put: Callable[[Event], None],
        log: Callable[[steps.WriteLog], None],
    ) -> None:
        """`put` is called on any thread with events for the election, `log` with log lines."""
        self._watcher = watcher
        self._resolver = resolver
        self._put = put
        self._log = log
        self._watches: dict[Watched, Any] = {}

    def run(self, effect: Effect) -> None:
        """Run any effect except a request and `NodesLost`."""
        match effect:
            case steps.WatchKeys():
                self._watch(effect)
            case steps.EndWatch(kind):
                if (watch := self._watches.pop(kind, None)) is not None:  # otherwise it never began
                    watch.close()
            case steps.Publish(kvs, revision):
                self._resolver.learn(kvs, revision)
            case steps.ResetRevision():
                self._resolver.reset_revision()
            case steps.PermanentError(sentence):
                self._resolver.set_permanent_error(sentence)
            case steps.EtcdTrouble(sentence):
                self._resolver.trouble = sentence
            case steps.WriteLog():
                self._log(effect)
            case _:
                raise AssertionError(f"{effect} is the shell's")

    def _watch(self, effect: steps.WatchKeys) -> None:
        def on_events(events: Sequence[WatchEvent]) -> None:
            if effect.kind is Watched.LEADER:
                for event in events:
                    if event.kind == "put":
                        self._resolver.learn([event.kv], event.kv.mod_revision)
            self._put(steps.Changed(effect.number, tuple(events)))

        def on_lost(lost: WatchEnd) -> None:
            self._put(steps.Unwatched(effect.number, lost))

        self._watches[effect.kind] = self._watcher.watch(
            effect.key, effect.revision, on_events, on_lost, prefix=effect.prefix
        )


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
        """Connect the parts.

        Args:
            connect: creates the client; called on the candidate's thread because it imports modules.
            keys, settings: those of the job.
            resolver: this node's knowledge of the coordinator, shared with its link.
            find_addresses: returns this machine's addresses for others, the likeliest first; might look up names.
            listen: opens sockets on these addresses, all on one port.
            own: this node.
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
        self._term: _Term | None = None
        self._lead = LeaderLease()
        resolver.on_news = self._on_link_news
        self._thread = threading.Thread(target=self._run, name="rallypoint-etcd", daemon=True)

    def start(self) -> None:
        """Begin the candidacy; returns at once."""
        self._thread.start()

    @property
    def is_leader(self) -> bool:
        """Whether this agent is the coordinator."""
        return self._election.is_leader

    @property
    def coordinator(self) -> Dispatcher | None:
        """The coordinator, if this agent is elected; from any thread."""
        term = self._term
        return None if term is None else term.dispatcher

    def close(self) -> None:
        """Hand over the coordination and leave etcd; wait until that is complete. Idempotent."""
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
            log.exception("no etcd client can be created")
            self._resolver.set_permanent_error(f"no etcd client can be created ({type(error).__name__}: {error})")
            return
        self._effects = EffectRunner(self._client, self._resolver, self._inbox.put, _log)
        with closing(self._client):
            event: Event = steps.Tick()
            while self._step(event):
                event = self._next_event()
            self._end_term(0.0)  # no term exists unless a step failed

    def _next_event(self) -> Event:
        at = self._election.wake_at
        try:
            return self._inbox.get(timeout=None if at == math.inf else max(0.0, at - SYSTEM_CLOCK.monotonic()))
        except queue.Empty:
            return steps.Tick()

    def _step(self, event: Event) -> bool:
        """Step the machine and run its effects; returns whether to continue."""
        try:
            for effect in self._election.step(event, SYSTEM_CLOCK.monotonic()):
                if isinstance(effect, steps.Ask):
                    self._ask(effect)
                elif isinstance(effect, steps.NodesLost):
                    if self._term is not None:
                        dispatcher = self._term.dispatcher
                        dispatcher.turns.call(partial(dispatcher.nodes_lost, effect.nodes, effect.detail))
                else:
                    self._effects.run(effect)
        except Exception as error:  # law 2
            if isinstance(event, steps.Broken):
                log.exception("this agent's registration in etcd cannot be removed either")
                if self._closed.wait(LONG_PAUSE):
                    return False
            self._inbox.put(steps.Broken(error))
        return self._election.phase is not CandidatePhase.GONE

    def _on_link_news(self) -> None:
        self._inbox.put(steps.LinkNews(self._resolver.met, self._resolver.refusing_lease, self._resolver.lost))

    # Requests

    def _ask(self, effect: steps.Ask) -> None:
        try:
            answer = self._perform(effect.request, effect.timeout_s)
        except Exception as error:
            self._inbox.put(steps.Failed(effect.number, error))
        else:
            self._inbox.put(steps.Answered(effect.number, answer))

    def _perform(self, request: steps.Request, timeout_s: float | None) -> Answer:
        client = self._client
        match request:
            case steps.Txn(compares, then, otherwise):
                return client.txn(compares, then, otherwise, timeout_s=timeout_s)
            case steps.Grant(ttl_s):
                return client.lease_grant(ttl_s, timeout_s=timeout_s)
            case steps.RenewLease(lease):
                asked_at = self._lead.now()
                seconds = client.lease_keep_alive(lease, timeout_s=timeout_s)
                if lease == self._election.lease:  # not the lease of the job's state
                    self._kept_alive(asked_at, seconds)
                return seconds
            case steps.Revoke(lease):
                client.lease_revoke(lease, timeout_s=timeout_s)
            case steps.FindAddresses():
                return steps.Addresses(tuple(self._find_addresses()))
            case steps.StartTerm():
                return self._start_term(request)
            case steps.EndTerm(linger_s):
                self._end_term(linger_s)
        return None

    def _kept_alive(self, asked_at: float, seconds: int) -> None:
        """Note that our lease lives for `seconds` from that time on; 0 if it is gone."""
        if not seconds:
            self._lead.end()
        else:
            self._lead.extend(asked_at, seconds)
            if self._term is not None:
                self._term.dispatcher.turns.call(self._term.dispatcher.tick)

    def _start_term(self, request: StartTerm) -> Listening:
        """Coordinate the job from the takeover. Raises OSError if no socket can be opened, and UserError if the address
        to listen on is not this machine's."""
        self._end_term(0.0)  # no term exists unless a step failed
        if version := self._client.diverging_version:
            log.warning(_DIVERGES, version)
        takeover, settings = request.takeover, self._settings
        incarnation = takeover.incarnation or secrets.token_hex(8)
        journal = Journal(self._keys, request.fence, incarnation, takeover)
        writer = JournalWriter(self._client, journal, lambda why: self._inbox.put(steps.Deposed(request.number, why)))
        former = RestoredState(incarnation, takeover.state)
        dispatcher = Dispatcher(settings, restored=former, journal=writer, lead=self._lead)
        allow_nodes(settings.max_nodes)
        secret = secrets.token_hex(16)
        writer.start(lambda number: dispatcher.turns.call(partial(dispatcher.journal_written, number)))
        try:
            listeners = self._listen(request.addresses)
            server = ControlServer(dispatcher, listeners, keys=lambda _job: (secret.encode(),), tls=self._resolver.tls)
        except BaseException:
            writer.close()
            raise
        self._term = _Term(dispatcher, writer, server)
        return Listening(request.addresses, server.port, secret)

    def _end_term(self, linger_s: float) -> None:
        """Stop coordinating; nodes get `linger_s` seconds to read the last notifications and disconnect."""
        term, self._term = self._term, None
        if term is not None:
            self._lead.end()
            # When the server ends, nodes disconnect, which must not count as their departure.
            term.writer.close(_LAST_WRITES if linger_s else 0.0)
            term.server.close(linger_s, f"{host_name()} no longer hosts it")


def _log(line: steps.WriteLog) -> None:
    log.log(line.level, line.text, *line.args, exc_info=line.error)
