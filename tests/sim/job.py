"""One run of a scenario: all parts start, faults strike at their times, and in the end everything has ended."""

from __future__ import annotations

import logging
import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from rallypoint.agent.policy import Phase
from rallypoint.control.coordinator.dispatcher import RestoredState
from rallypoint.control.coordinator.leader_lease import LeaderLease
from rallypoint.control.election.keys import ElectionKeys, decode_snapshot, state_of
from rallypoint.control.membership.state import Settings, State, known_to, recovery_timeout
from rallypoint.control.protocol.codec import CodecError, decode_state
from tests.sim.agent import Agent
from tests.sim.audit import Audit
from tests.sim.etcd import Etcd
from tests.sim.faults import strike
from tests.sim.ground_truth import number_of
from tests.sim.hangs import HangAudit
from tests.sim.link import SimLink
from tests.sim.network import Network
from tests.sim.scenario import NodePlan, Scenario
from tests.sim.server import Server
from tests.sim.workers import WorkerProcesses
from tests.sim.world import Process, Violation, World

if TYPE_CHECKING:
    from tests.sim.election import SimTerm

logging.getLogger("rallypoint").addHandler(logging.NullHandler())  # the trace tells what happens

_LOOK_EVERY = 1.0
"""Seconds between looks whether the job still moves, once it is calm."""


class Result(NamedTuple):
    """What came of a run."""

    scenario: Scenario
    violation: tuple[str, str] | None
    """The rule that was broken, and how."""
    steps: int
    seconds: float
    rounds: int
    verdict: str
    fates: Counter[str]
    trace: list[str]


def run(scenario: Scenario, *, tracing: bool = False) -> Result:
    """Run a scenario to its end. The same scenario gives the same result, to the last line of its trace."""
    global _running
    job = _running = Job(scenario, tracing=tracing)
    violation = None
    try:
        job.run()
    except Violation as broken:
        violation = (broken.rule, str(broken))
    except (AssertionError, LookupError, TypeError, ValueError, AttributeError, CodecError) as error:
        violation = (f"{type(error).__name__} in {_place(error)}", repr(error))
    world, audit = job.world, job.audit
    verdict = audit.verdict.outcome.value if audit.verdict is not None else "none"
    fates = Counter(agent.fate.name if agent.fate is not None else "RUNNING" for agent in job.agents.values())
    return Result(scenario, violation, world.steps, world.now, len(audit.rounds), verdict, fates, world.trace)


_running: Job | None = None


def running() -> Job:
    """The job that runs, for planted bugs that know more than they should."""
    assert _running is not None, "no job runs"
    return _running


def _place(error: BaseException) -> str:
    trace, place = error.__traceback__, "?"
    while trace is not None:
        place = f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_frame.f_code.co_name}"
        trace = trace.tb_next
    return place


class Job:
    """All that there is in one run."""

    def __init__(self, scenario: Scenario, *, tracing: bool = False) -> None:
        self.scenario = scenario
        self.world = World(tracing=tracing)
        self.network = Network(self.world, delay=scenario.delay)
        self.keys = ElectionKeys.for_job("/rallypoint", "sim")._replace(
            seats=scenario.seats, part_size=scenario.part_size
        )
        self.etcd = Etcd(self.world, scenario.stream("etcd"), scenario.delay) if scenario.etcd else None
        """What keeps the control plane, where the server is elected."""
        self.settings = Settings(
            "sim",
            scenario.min_nodes,
            scenario.max_nodes,
            join_timeout=scenario.join_timeout,
            last_call_timeout=scenario.last_call,
            lease=scenario.lease,
            notice_timeout=scenario.notice_timeout,
            restart_backoff=scenario.backoff,
            segment=scenario.segment,
        )
        self.plans = {plan.number: plan for plan in scenario.nodes}
        self.agents: dict[int, Agent] = {}
        self.yard = WorkerProcesses()
        self.servers = 0
        self.server: Server | None = None
        self.audit = Audit(self)
        self.hangs = HangAudit(self)
        self.network.on_stall = self._stalled
        self.cut_all_until = -scenario.join_timeout
        self.cut_until: dict[int, float] = {}
        """Until when nodes are cut off from each other."""
        self.last_to_leave = -1, -math.inf
        """The node that began last to leave the election, and when."""
        self.etcd_cut_until: dict[int, float] = {}
        """Until when nodes are cut off from etcd alone."""
        self._server_since = 0.0
        self._stuck_since: float | None = None
        self._stuck_round = 0

    def run(self) -> None:
        """Let everything happen."""
        scenario, world = self.scenario, self.world
        if not scenario.hosted and self.etcd is None:
            self.new_server()
        for plan in scenario.nodes:
            world.at(plan.start, self._start, plan)
        for fault in scenario.faults:
            world.at(fault.at, strike, self, fault)
        world.at(scenario.calm, self._look)
        world.run(scenario.calm + self._join_allowance())
        living = [str(agent.process) for agent in self.agents.values() if agent.alive]
        if living:
            raise Violation("agents are left", f"{', '.join(living)} after {world.now:.1f} s")
        if self.etcd is not None:
            state_may_stay = self._state_may_stay(self.etcd)
            left = [each for each in self.etcd.stored if not (state_may_stay and each.startswith(self.keys.state))]
            if left:
                raise Violation("something is left in etcd", f"{sorted(left)}")

    def _state_may_stay(self, etcd: Etcd) -> bool:
        """Whether the state may outlive all agents, until its own lease ends (law 5 of `machine`).

        That is so where the last one to leave had perhaps no key, or got no answer, or saw the key of one that was dead
        and not known to be; where the state is of another launch for it, since its last session was with another
        coordinator; and where the state names a node that may come back, since the job does not know that it has left.
        Such is also a placeholder:

            1. A job ends while node 0 is paused, and its key has ended. Node 1 leaves, and takes the state away.
            2. Node 0 is back, finds nothing, and begins anew: with its round, and a placeholder for node 1.
            3. When node 0 leaves, it cannot know that node 1 is not merely cut off.
        """
        number, since = self.last_to_leave
        if len(self.scenario.nodes) > self.scenario.seats or etcd.unanswered or etcd.key_lost_at >= since:
            return True
        if self.keys.state not in etcd.stored:
            return False
        snapshot = decode_snapshot(self.keys.state, etcd.stored[self.keys.state].value)
        state = decode_state(state_of(self.keys, snapshot, etcd.stored.values()))
        others = {number_of(node) for node in known_to(state)} - {number}
        link = self.agents[number].link
        if isinstance(link, SimLink) and snapshot.incarnation != f"server-{link.source}":
            return True
        return state.verdict is None and not others <= self.audit.left

    def new_server(self, process: Process | None = None, home: int = -1) -> Server:
        """Start a control server at the endpoint, in a process of its own or in a node's."""
        number = self.servers
        self.servers += 1
        if process is None:
            process = Process(self.world, f"server {number}", self.scenario.stream(f"server {number}"))
        self.world.note(process, "serves")
        self.network.endpoint_silent = False
        self._server_since = self.world.now
        self.server = Server(process, self.network, self.settings, number, self.audit, home)
        return self.server

    def new_incarnation(self) -> str:
        """A name for a coordinator that knows nothing of any before it."""
        self.servers += 1
        return f"server-{self.servers - 1}"

    def new_term(
        self, process: Process, node: int, former: RestoredState, memory: SimTerm, secret: bytes, lead: LeaderLease
    ) -> Server:
        """Start the control server of a node that was elected."""
        assert self.etcd is not None
        number = int(former.incarnation.rpartition("-")[2])
        server = Server(
            process,
            self.network,
            self.settings,
            number,
            self.audit,
            -1,
            former=former,
            memory=memory,
            secret=secret,
            lead=lead,
            host=node,
        )
        self.server = server
        self._server_since = self.world.now
        state = former.state
        self.world.note(
            process, "serves as %s, round %d, complete: %s", former.incarnation, state.round, state.complete
        )
        self.audit.takes_over(server, memory.fence)
        # Who cannot ask etcd does not find the new one, and where that one is cut off, nobody does.
        for each, until in self.etcd_cut_until.items():
            self._excuse(each, until)
        for each in self.plans:
            self._excuse(each, self.cut_until.get(node, 0.0))
        # Who has no key is waited for only for a moment, in which a slow etcd may not say where the new one is.
        if self.etcd.slow or self.etcd.losing or self.world.now < self.etcd.unsure_until + self.settings.lease:
            for each in self.agents:
                self.audit.disturb(each)
        return server

    def cut_from_etcd(self, node: int, until: float) -> None:
        """A node cannot reach etcd until then; it may not have found a coordinator that is new."""
        self.etcd_cut_until[node] = max(self.etcd_cut_until.get(node, 0.0), until)
        if self.world.now < self._server_since + 2 * self.settings.lease:
            self._excuse(node, until)

    def _excuse(self, node: int, until: float) -> None:
        if until > self.world.now:
            self.audit.disturb(node, until - self.world.now)

    def server_up_for(self) -> float:
        """For how many seconds there has been a server at the endpoint."""
        if self.etcd is not None:
            server = self.server
            if server is None or not server.alive or server.process.paused or not self.etcd.is_well:
                return 0.0
            return self.world.now - max(self._server_since, self.etcd.well_since)
        if self.network.listener is None or self.server is None or self.server.process.paused:
            return 0.0
        return self.world.now - self._server_since

    # Inside

    def _stalled(self, node: int, seconds: float) -> None:
        if seconds > self.settings.lease / 6:
            self.audit.disturb(node, seconds)

    def _start(self, plan: NodePlan) -> None:
        self.agents[plan.number] = Agent(self, plan)

    def _join_allowance(self) -> float:
        """Seconds after the calm in which everybody must have come to an end."""
        scenario = self.scenario
        rounds = 4 * (scenario.temper.longest + scenario.grace + scenario.check)
        return 3 * scenario.join_timeout + rounds + 12 * scenario.lease + 60

    def _look(self) -> None:
        """The calm: a server is there again unless the job is abandoned, and with enough nodes a round completes."""
        living = [agent for agent in self.agents.values() if agent.alive]
        if not living:
            return
        lost = self.network.listener is None and self.etcd is None
        if lost and not self.scenario.abandoned and self.audit.verdict is None:
            self.new_server()
        self._check_stuck(living)
        self.world.after(_LOOK_EVERY, self._look)

    def _check_stuck(self, living: list[Agent]) -> None:
        server = self.server if self.server is not None and self.server.alive else None
        state = server.coordinator.state if server is not None else State()
        able = [agent for agent in living if agent.status.phase not in (Phase.ENDING, Phase.ENDED)]
        if server is not None:
            able = [agent for agent in able if agent.connected]
        elif self.etcd is None:
            able = []
        least = self.settings.min_nodes if state.size is None else state.size.min_nodes
        enough = self.scenario.in_whole_segments(agent.number for agent in able)
        # A round may begin and end between two looks.
        moved, self._stuck_round = state.round != self._stuck_round, state.round
        if moved or state.complete or self.audit.verdict or state.verdict or enough < least:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = self.world.now
        scenario = self.scenario
        bound = (
            scenario.last_call
            + scenario.grace
            + scenario.check
            + 5 * scenario.lease
            + max(8 * scenario.backoff, state.restart_delay)
            + 10.0
        )
        if self.etcd is not None:
            bound += 2 * recovery_timeout(
                self.settings
            )  # each new coordinator of a job that was forgotten waits for as long
        if self._stuck_since is not None and self.world.now - self._stuck_since > bound:
            raise Violation("enough nodes are there and no round completes", f"for {bound:.1f} s: {state}")
