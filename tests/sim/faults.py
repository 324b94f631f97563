"""What each kind of fault does."""

from __future__ import annotations

from collections.abc import Callable
from signal import SIGINT, SIGTERM
from typing import TYPE_CHECKING

from tests.sim.link import SimLink
from tests.sim.scenario import SERVER, Fault

if TYPE_CHECKING:
    from tests.sim.agent import Agent
    from tests.sim.job import Job


def strike(job: Job, fault: Fault) -> None:
    """The fault's moment has come. Who is not there any more is spared."""
    job.world.note("fault", "%s", fault)
    if fault.node == SERVER:
        _ON_SERVER[fault.kind](job, fault)
        return
    if fault.kind == "cut-all":
        _cut_all(job, fault)
        return
    agent = job.agents.get(fault.node)
    if agent is not None and agent.process.alive:
        _ON_NODE[fault.kind](job, agent, fault)


def _cut_all(job: Job, fault: Fault) -> None:
    # A server without a node in its own process knows that it is cut off when all of several nodes are silent, unless
    # a moment between two cuts was enough for some of them.
    several = _host(job) is None and sum(_beats(job, agent) for agent in job.agents.values()) >= 2
    again = job.world.now < job.cut_all_until + 2 * job.settings.lease
    job.cut_all_until = max(job.cut_all_until, job.world.now + fault.length)
    for number in job.plans:
        agent = job.agents.get(number)
        late = agent is not None and not _beats(job, agent)
        _cut(job, number, fault.length, disturbs=again or late or not several)


def _beats(job: Job, agent: Agent) -> bool:
    """Whether the server has heard of the node as lately as it should."""
    if not (agent.alive and agent.connected and isinstance(agent.link, SimLink)) or agent.link.connection is None:
        return False
    return job.world.now - agent.link.connection.ends[1].arrived_at < job.settings.lease * 0.4


def _worker_failure(_job: Job, agent: Agent, _fault: Fault) -> None:
    agent.crew.fail()


def _agent_kill(job: Job, agent: Agent, _fault: Fault) -> None:
    job.audit.disturb(agent.number)
    agent.kill()
    _hang_up_all(job, agent)


def _power_off(job: Job, agent: Agent, _fault: Fault) -> None:
    job.audit.disturb(agent.number)
    job.network.fall_silent(agent.process)
    if agent.server is not None and job.network.listener is agent.server:
        job.network.listener = None
        job.network.endpoint_silent = True
    agent.kill()


def _terminate(job: Job, agent: Agent, fault: Fault) -> None:
    job.audit.disturb(agent.number, job.settings.notice_timeout + job.scenario.grace)
    if fault.amount > 1.0:
        agent.signal(SIGTERM)
    else:
        agent.signal(SIGINT)
        job.world.after(fault.amount, agent.signal, SIGINT)


def _agent_pause(job: Job, agent: Agent, fault: Fault) -> None:
    if not agent.process.paused:
        job.audit.disturb(agent.number, fault.length)
        agent.process.pause()
        job.world.after(fault.length, _resume, agent)


def _resume(agent: Agent) -> None:
    if agent.process.alive:
        agent.process.resume()


def _cut_one(job: Job, agent: Agent, fault: Fault) -> None:
    _cut(job, agent.number, fault.length)


def _cut(job: Job, number: int, length: float, *, disturbs: bool = True) -> None:
    if disturbs:
        job.audit.disturb(number, length)
    job.network.cut(number)
    job.world.after(length, job.network.heal, number)


def _reset(job: Job, agent: Agent, _fault: Fault) -> None:
    job.audit.disturb(agent.number)
    if isinstance(agent.link, SimLink) and agent.link.connection is not None:
        agent.link.connection.reset()


def _half_open(job: Job, agent: Agent, _fault: Fault) -> None:
    job.audit.disturb(agent.number)
    if isinstance(agent.link, SimLink) and agent.link.connection is not None:
        agent.link.connection.reset_at_node()


def _clock_jump(_job: Job, agent: Agent, fault: Fault) -> None:
    agent.wall_skew += fault.amount


def _close(_job: Job, agent: Agent, _fault: Fault) -> None:
    agent.close_job()


_ON_NODE: dict[str, Callable[[Job, Agent, Fault], None]] = {
    "worker-failure": _worker_failure,
    "agent-kill": _agent_kill,
    "power-off": _power_off,
    "terminate": _terminate,
    "agent-pause": _agent_pause,
    "cut": _cut_one,
    "reset": _reset,
    "half-open": _half_open,
    "clock-jump": _clock_jump,
    "close": _close,
}


def _server_pause(job: Job, fault: Fault) -> None:
    server = job.server
    if server is None or not server.alive or server.process.paused:
        return
    host = _host(job)
    if host is not None:
        _agent_pause(job, host, fault)
        return
    process = server.process
    process.pause()
    job.world.after(fault.length, lambda: process.resume() if process.alive else None)


def _server_kill(job: Job, fault: Fault) -> None:
    _end_server(job, fault, silent=False)


def _server_power_off(job: Job, fault: Fault) -> None:
    _end_server(job, fault, silent=True)


def _end_server(job: Job, fault: Fault, *, silent: bool) -> None:
    server = job.server
    if server is None or not server.alive:
        return
    host = _host(job)
    if host is not None:
        (_power_off if silent else _agent_kill)(job, host, fault)
    else:
        if silent:
            job.network.fall_silent(server.process)
        job.network.endpoint_silent = silent
        job.network.listener = None
        server.process.kill()
        if not silent:
            _hang_up_sessions(job)
    job.world.after(fault.length, _server_back, job)


def _server_back(job: Job) -> None:
    if job.network.listener is None:
        job.new_server()


def _hang_up_all(job: Job, agent: Agent) -> None:
    if agent.server is not None and job.network.listener is agent.server:
        job.network.listener = None
        _hang_up_sessions(job)


def _hang_up_sessions(job: Job) -> None:
    """The kernel of a killed server ends its connections."""
    if job.server is not None:
        for holder in list(job.server.sessions.values()):
            holder.break_off()


def _host(job: Job) -> Agent | None:
    """The agent in whose process the server lives."""
    if job.server is None:
        return None
    return next((agent for agent in job.agents.values() if agent.process is job.server.process), None)


_ON_SERVER: dict[str, Callable[[Job, Fault], None]] = {
    "server-pause": _server_pause,
    "server-kill": _server_kill,
    "server-power-off": _server_power_off,
}
