"""An agent's part in the election: its candidacy, and its terms as the coordinator. Pure: events in, effects out.

    RESTING the goal (to register, to take over) waits for the end of its pause
    ASKING the goal is in progress
    STANDBY    has no key, since there are candidates enough, and looks again from time to time
    WAITING    is a candidate, as others are that are older
    LEADING    coordinates the job
    ENDING     gives up what it has, for a while or for good
    GONE       has left etcd

A lasting state is a phase. A sequence of requests is a `Procedure`, of which one runs at a time: the goal, a chore
(such as keeping the lease alive), or the end. One table contains the time of each chore. With a slow etcd, a goal might
take longer than the lease, so the lease is kept alive between two of its requests, none of which may take longer than
half the lease.

Laws:

1. A few agents are candidates, each with a key that lives as long as its lease. The candidate with the oldest key is
   the coordinator.
2. Each candidate sees all keys, and takes over when no older key is left.
3. While etcd is unreachable, nobody gives up anything. A lease ends only when etcd says so. Then the agent registers
   again, last in line.
4. A coordinator whose machine refuses connections to its port is dead, even if its lease is alive: the next candidate
   in line ends that lease. A mistake here deposes a live coordinator, which costs a new term and the agent's place in
   the round. So a live agent that stops coordinating ends its lease before its port refuses connections.
5. The last agent to leave deletes the job's keys. Being refused temporarily is not leaving. If agents without a key
   might remain, the state stays until its own lease ends.
6. Any error, expected or not, is an event: the agent gives up everything, and begins again after a pause.
7. An agent without a key has one watch, on the leader's key, and looks for a free seat. It looks soon while no
   coordinator is reachable, so that the job survives the death of all candidates; otherwise so rarely that all agents
   together make a few requests per second. Agents with the same reason look at different times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import TypeAlias

from rallypoint.control.election import procedures, steps
from rallypoint.control.election.keys import ElectionKeys
from rallypoint.control.election.procedures import (
    STATE_TTL,
    ElectionView,
    Leadership,
    Presence,
    Registration,
    Runner,
    StepContext,
    leave,
    min_absence,
)
from rallypoint.control.election.steps import (
    CandidatePhase,
    Chore,
    Effect,
    Event,
    Procedure,
    Watched,
    number_of,
)
from rallypoint.control.etcd.api import EtcdError, EtcdLeaseGone, EtcdUnreachable, KeyValue, WatchCancelled
from rallypoint.control.membership.state import NodeId, Settings
from rallypoint.control.protocol.errors import RendezvousStateError

PAUSE, LONG_PAUSE = 0.25, 4.0
"""First and maximum pause in seconds before asking etcd again after no answer: a thousand agents might do the same."""

LEAVE_TIMEOUT = 2.0
"""Seconds for each of the last requests to etcd."""

ARRIVALS = 16384
"""Agents of a new job that look per second: if all arrive at once, the first few become candidates."""
LOOKS_SOON, LOOK_SOON = 4096, 1.0
"""Agents of a job without a coordinator that look per second, and each agent's maximum wait in seconds if there are
fewer: the next candidate takes over meanwhile."""
LOOKS_LATE, LOOK_LATE = 8, 30.0
"""The same while there is a coordinator."""

_Method: TypeAlias = "Callable[[Election], Procedure[None]]"


class Election:
    """One agent in etcd. Call `step` with each event, carry out the returned effects in order, and send a `Tick` at
    `wake_at`.
    """

    def __init__(self, keys: ElectionKeys, settings: Settings, own: NodeId, rng: Random) -> None:
        """Prepare; no requests are made before the first step.

        Args:
            keys, settings: those of the job.
            own: this node.
            rng: makes pauses differ from other agents'.
        """
        self.phase = CandidatePhase.RESTING
        self._keys = keys
        self._settings = settings
        self._own = own
        self._rng = rng
        self._ttl = max(1, math.ceil(settings.lease))
        self._closed = False
        self._context = StepContext()
        self._runner = Runner(self._context, self._on_procedure_error, self._urgent, self._timeout)
        self._deposing = procedures.Deposing(self._context)
        self._leadership = Leadership(keys, settings, self._context)
        self._presence = Presence()
        self._goal: _Method = Election._draw_start
        self._rest_until = -math.inf
        self._pause = PAUSE
        self._due: dict[Chore, float] = {}  # when chores are due
        self._link = steps.LinkNews()
        self._addresses: tuple[str, ...] = ()
        self._seen = 0  # the latest revision with information about a coordinator
        self._led = False  # whether the leader's key shows a coordinator
        self._place: Registration | None = None
        self._looks_soon = False  # whether the planned look is due to a missing coordinator
        self._stood = False  # whether we had a seat since we last found none free

    @property
    def is_leader(self) -> bool:
        """Whether this agent is the coordinator."""
        return self.phase is CandidatePhase.LEADING

    @property
    def lease(self) -> int:
        """The lease of this agent's key; 0 without a key."""
        return 0 if self._place is None else self._place.lease

    @property
    def wake_at(self) -> float:
        """When to send a `Tick`, on the clock of `now`; infinity while waiting for an answer or a watch."""
        if self._runner.busy or self.phase is CandidatePhase.GONE:
            return math.inf
        resting = self._rest_until if self.phase in _PAUSES else math.inf
        return min(*self._due.values(), resting, self._presence.wake_at if self.is_leader else math.inf)

    def step(self, event: Event, now: float) -> list[Effect]:
        """Handle an event at `now`; return the effects. If one is a request, it is the last."""
        self._context.now = now
        self._context.pop_effects()
        self._handle(event)
        while not self._runner.busy and (due := self._next()) is not None:
            self._runner.begin(*due)
        if self.is_leader and not self._runner.busy:
            self._leadership.remove_lost(self._presence.overdue(now), "its lease in etcd has ended")
        return self._context.pop_effects()

    # Events

    def _handle(self, event: Event) -> None:
        match event:
            case steps.Tick():
                pass
            case steps.LeaveElection():
                self._closed = True
            case steps.Answered() | steps.Failed():
                self._runner.go_on(event)
            case steps.Broken(error):
                self._runner.drop()
                self._context.unwatch_all()  # a watch might never have begun
                self._give_up(error)
            case steps.LinkNews():
                self._link = event
                self._look_at_link()
            case steps.Changed():
                self._on_changed(event)
            case steps.Unwatched():
                self._on_unwatched(event)
            case steps.Deposed(term, why):
                if term == self._leadership.term:
                    self._leadership.deposed = why

    def _on_changed(self, event: steps.Changed) -> None:
        kind = self._context.watched(event.watch)
        if kind is Watched.LEADER:
            last = event.events[-1]
            self._note_leader(last.kind == "put", last.kv.mod_revision)
        elif kind is Watched.NODES:
            self._presence.change(event.events, self._context.now + min_absence(self._settings))

    def _on_unwatched(self, event: steps.Unwatched) -> None:
        """Retry a watch that etcd refused when the lease is next kept alive, not at once."""
        kind = self._context.watched(event.watch)
        if kind is None:
            return
        self._context.has_ended(kind)
        again = self._context.now
        if isinstance(event.lost, WatchCancelled):
            again = self._due.get(Chore.KEEP_LEASE, again + self._ttl / 3)
        self._context.log(steps.INFO, "an etcd watch ended (%s), so its keys are being read again", event.lost)
        self._due[_READS_AGAIN[kind]] = again

    # Next actions

    def _next(self) -> tuple[Procedure[None], Chore | None] | None:
        """The next procedure to run, if any."""
        if self.phase is CandidatePhase.GONE:
            return None
        if self._closed:
            return self._end(None), None
        if self.is_leader and self._leadership.deposed:
            return self._end(EtcdLeaseGone(self._leadership.deposed)), None
        if (urgent := self._urgent()) is not None:
            return urgent
        if self.phase is CandidatePhase.WAITING and self._predecessor is None:
            self._set_goal(Election._take_over)
            return self._take_over(), None
        if self.phase in _PAUSES and self._context.now >= self._rest_until:
            self.phase = CandidatePhase.ASKING
            return self._goal(self), None
        chore = next((chore for chore in Chore if self._due.get(chore, math.inf) <= self._context.now), None)
        if chore is None:
            return None
        del self._due[chore]
        return self._CHORES[chore](self), chore

    def _urgent(self) -> tuple[Procedure[None], Chore] | None:
        """The keep-alive of the lease, if due while a goal is in progress."""
        if self.phase is CandidatePhase.ENDING or self._due.get(Chore.KEEP_LEASE, math.inf) > self._context.now:
            return None
        del self._due[Chore.KEEP_LEASE]
        return self._keep_lease_alive(), Chore.KEEP_LEASE

    def _timeout(self) -> float | None:
        """Maximum seconds for a request to etcd.

        While we hold a lease, it is kept alive only after the request in progress (law 3):

            1. A watch is lost, and a chore reads the keys again. etcd is away for a moment, and its answer is lost.
            2. etcd is back. Our lease has its full time again, and a keep-alive is due.
            3. If the chore waited as long as the client does, that would exceed the lease. The coordinator would be
               deposed, and its node lost, because etcd was away for a moment.
        """
        if self.phase is CandidatePhase.ENDING:
            return LEAVE_TIMEOUT
        return None if self._place is None else self._ttl / 2

    def _on_procedure_error(self, error: Exception, chore: Chore | None) -> None:
        """Handle a failed procedure: law 3 applies if etcd is unreachable, otherwise law 6."""
        if not isinstance(error, EtcdUnreachable) or self.phase is CandidatePhase.ENDING:
            self._give_up(error)
            return
        self._context.set_trouble(str(error))
        if chore is None:
            self._wait_before_retry(self._pause)
            self._pause = min(2 * self._pause, LONG_PAUSE)
        else:  # the keep-alive has its own schedule
            later = self._context.now + PAUSE
            self._due.setdefault(chore, later)
            self._due = {chore: at if chore is Chore.KEEP_LEASE else max(at, later) for chore, at in self._due.items()}

    def _give_up(self, error: Exception) -> None:
        if self.phase is CandidatePhase.ENDING:
            self._context.warn(error, "this agent's registration in etcd could not be removed cleanly")
            self._has_ended(LONG_PAUSE, for_good=self._closed)
        else:
            self._runner.begin(self._end(error))

    def _set_goal(self, goal: _Method, phase: CandidatePhase = CandidatePhase.ASKING) -> None:
        """Set the next goal after reaching the previous one."""
        self._context.set_trouble("")
        self._goal, self._pause, self.phase = goal, PAUSE, phase

    def _wait_before_retry(self, seconds: float) -> None:
        self.phase = CandidatePhase.RESTING
        self._rest_until = self._context.now + seconds * self._rng.uniform(0.5, 1.0)

    # Goals

    def _draw_start(self) -> Procedure[None]:
        """Choose a random time for the first look."""
        self._set_goal(Election._register, CandidatePhase.RESTING)
        seconds = self._settings.max_nodes / ARRIVALS if self._settings.max_nodes > self._keys.seats else 0.0
        self._rest_until = self._context.now + seconds * self._rng.random()
        yield from ()

    def _register(self) -> Procedure[None]:
        """Become a candidate if there are too few."""
        seen = self._seen
        view = yield from procedures.read_election(self._keys)
        if view.revision < seen:
            text = "etcd went back from revision %d to %d and lost data, so this agent is registering again"
            self._context.log(steps.WARNING, text, seen, view.revision)
            self._seen = 0
            self._context.add(steps.ResetRevision())
            self._context.unwatch(Watched.LEADER)
        self._see_leader(view)
        self._context.add(steps.PermanentError(""))
        if self._keys.free_seats(view.candidates):
            self._addresses = yield from procedures.find_addresses(self._addresses)
            asked_at = self._context.now
            self._place, view = yield from procedures.register(self._keys, self._own, self._ttl, view, self._rng)
            self._see_leader(view)
        self._stood = self._place is not None
        if self._place is None:
            self._set_goal(Election._register, CandidatePhase.STANDBY)
            self._plan_look(anew=True)
            return
        self._due = {Chore.KEEP_LEASE: asked_at + self._ttl / 3}
        self._deposing.lease_kept(asked_at, self._ttl)
        self._presence = Presence(view.candidates)
        self._context.watch(Watched.NODES, self._keys.candidates, view.revision, prefix=True)
        self._set_goal(Election._take_over, CandidatePhase.WAITING)
        self._look_at_link()

    @property
    def _predecessor(self) -> KeyValue | None:
        """The next older candidate."""
        return None if self._place is None else self._presence.last_before(self._place.fence[1])

    def _plan_look(self, *, anew: bool = False) -> None:
        """Plan to look for a free seat at a random time. This can only bring an existing plan forward.

        An early look takes place even if there is a coordinator by then: many seats might be free.
        """
        soon = not self._led or self._link.lost
        if self.phase is not CandidatePhase.STANDBY or not (anew or (soon and not self._looks_soon)):
            return
        self._looks_soon = soon
        looks, least = (LOOKS_SOON, LOOK_SOON) if soon else (LOOKS_LATE, LOOK_LATE)
        seconds = max(least, self._settings.max_nodes / looks)
        self._rest_until = self._context.now + seconds * self._rng.uniform(0.5, 1.0)

    def _take_over(self) -> Procedure[None]:
        assert self._place is not None, "this agent has no key"
        yield from self._leadership.take_over(
            self._place, self._addresses, self._link.met, self._deposing.dead, self._presence
        )
        self._deposing.dead = frozenset()  # the term knows them, and a returning node is alive
        self._due[Chore.KEEP_STATE] = self._context.now  # the time of the last keep-alive is unknown
        self._set_goal(Election._take_over, CandidatePhase.LEADING)

    # Chores

    def _keep_lease_alive(self) -> Procedure[None]:
        asked_at = self._context.now
        self._due[Chore.KEEP_LEASE] = asked_at + PAUSE
        if (yield from number_of(steps.RenewLease(self.lease))) == 0:
            raise EtcdLeaseGone("its lease was not kept alive in time")
        # Not at once, even if etcd is slow: the goal must make its next request first.
        self._due[Chore.KEEP_LEASE] = max(asked_at + self._ttl / 3, self._context.now + PAUSE)
        self._deposing.lease_kept(asked_at, self._ttl)
        self._look_at_link()

    def _keep_state_alive(self) -> Procedure[None]:
        self._due[Chore.KEEP_STATE] = self._context.now + STATE_TTL / 4
        yield from self._leadership.keep_state_alive()

    def _find_leader(self) -> Procedure[None]:
        self._see_leader((yield from procedures.read_election(self._keys)))

    def _find_candidates(self) -> Procedure[None]:
        view = yield from procedures.read_election(self._keys)
        self._presence.replace(view.candidates, self._context.now + min_absence(self._settings))
        self._context.watch(Watched.NODES, self._keys.candidates, view.revision, prefix=True)

    def _depose(self) -> Procedure[None]:
        if (predecessor := self._predecessor) is not None:
            yield from self._deposing.depose(predecessor)

    _CHORES: dict[Chore, _Method] = {  # noqa: RUF012 - a table, never changed
        Chore.KEEP_LEASE: _keep_lease_alive,
        Chore.KEEP_STATE: _keep_state_alive,
        Chore.FIND_LEADER: _find_leader,
        Chore.FIND_NODES: _find_candidates,
        Chore.DEPOSE: _depose,  # due again after our lease's next keep-alive
    }

    # End, for a while or for good

    def _end(self, why: Exception | None) -> Procedure[None]:
        """Give up everything, after an error or `LeaveElection`."""
        self.phase, for_good = CandidatePhase.ENDING, self._closed
        if self._leadership.term:
            yield from self._leadership.step_down(self.lease, lives=not for_good)
        self._context.unwatch(Watched.NODES)
        if isinstance(why, EtcdLeaseGone):
            if self._place is not None:
                self._context.log(
                    steps.WARNING, "this agent lost its registration in etcd (%s) and is registering again", why
                )
            self._has_ended(PAUSE, for_good=False)
            return
        if isinstance(why, EtcdError | RendezvousStateError):
            self._context.warn(why, "etcd cannot be used in its current state")
            self._context.add(steps.PermanentError(str(why)))
        elif why is not None:
            text = "this agent is giving up its registration in etcd temporarily after an unexpected error"
            self._context.warn(why, text)
            self._context.set_trouble(f"{type(why).__name__}: {why}")
        last = for_good and self._stood
        yield from leave(self._keys, self._place, self._own, self._link.met, self._context, may_be_last=last)
        self._has_ended(LONG_PAUSE, for_good=for_good)

    def _has_ended(self, pause: float, *, for_good: bool) -> None:
        self._place, self._due, self._goal, self._pause = None, {}, Election._register, PAUSE
        if for_good:
            self.phase = CandidatePhase.GONE
        else:
            self._wait_before_retry(pause)

    def _look_at_link(self) -> None:
        """Check whether the link's state makes a chore or a look due."""
        predecessor = self._predecessor
        if predecessor is not None and predecessor.lease == self._link.refused:
            self._due.setdefault(Chore.DEPOSE, self._deposing.earliest())
        self._plan_look()

    def _see_leader(self, view: ElectionView) -> None:
        self._context.add(steps.Publish(view.leader, view.revision))
        self._note_leader(bool(view.leader), view.revision if view.leader else 0)
        if not self._context.watches(Watched.LEADER):
            self._context.watch(Watched.LEADER, self._keys.leader, view.revision)

    def _note_leader(self, there: bool, revision: int) -> None:
        self._seen = max(self._seen, revision)
        self._led = there
        self._plan_look()


_PAUSES = (CandidatePhase.RESTING, CandidatePhase.STANDBY)
_READS_AGAIN = {Watched.LEADER: Chore.FIND_LEADER, Watched.NODES: Chore.FIND_NODES}
