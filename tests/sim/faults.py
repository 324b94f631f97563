"""The effect of each kind of fault."""

from __future__ import annotations

from collections.abc import Callable
from signal import SIGINT, SIGTERM
from typing import TYPE_CHECKING

from rallypoint.observe.watching.messages import (
    DrainCommand,
    ResizeCommand,
    RestartCommand,
    StopCommand,
    WatcherRequest,
    WatchRequest,
)
from tests.sim.link import SimLink
from tests.sim.scenario import SERVER, Fault

if TYPE_CHECKING:
    from tests.sim.agent import Agent
    from tests.sim.etcd import Etcd
    from tests.sim.job import Job


def strike(job: Job, fault: Fault) -> None:
    """The fault's moment has come. Who is not there any more is spared."""
    job.world.note("fault", "%s", fault)
    if fault.kind in _BY_OPERATOR:
        if job.server is not None and job.server.alive:
            job.server.process.hears(job.server.operate, _BY_OPERATOR[fault.kind](job, fault))
        return
    if fault.kind in _ON_ETCD:
        if job.etcd is not None:
            _ON_ETCD[fault.kind](job, job.etcd, fault)
        return
    if fault.node == SERVER:
        _ON_SERVER.get(fault.kind, _on_host)(job, fault)
        return
    if fault.kind == "cut-all":
        _cut_all(job, fault)
        return
    agent = job.agents.get(fault.node)
    if agent is not None and agent.process.alive:
        _ON_NODE[fault.kind](job, agent, fault)


_BY = "ann@login"


def _resize(job: Job, fault: Fault) -> WatcherRequest:
    least = 1 + int(fault.amount) // 3 % job.scenario.max_nodes
    return ResizeCommand(_BY, least, least + int(fault.amount) % 3)


_BY_OPERATOR: dict[str, Callable[[Job, Fault], WatcherRequest]] = {
    "op-watch": lambda _job, fault: WatchRequest(after=0 if fault.amount >= 1.0 else -1),
    "op-restart": lambda _job, _fault: RestartCommand(_BY),
    "op-drain": lambda _job, fault: DrainCommand(_BY, f"host-{fault.node}"),
    "op-resize": _resize,
    "op-stop": lambda _job, _fault: StopCommand(_BY),
}


def _cut_all(job: Job, fault: Fault) -> None:
    # A server without a node in its own process knows that it is cut off when all of several nodes are silent, unless
    # a moment between two cuts was enough for some of them.
    several = _host(job) is None and sum(_sends_heartbeats(job, agent) for agent in job.agents.values()) >= 2
    again = job.world.now < job.cut_all_until + 2 * job.settings.lease
    job.cut_all_until = max(job.cut_all_until, job.world.now + fault.length)
    for number in job.plans:
        agent = job.agents.get(number)
        late = agent is not None and not _sends_heartbeats(job, agent)
        _cut(job, number, fault.length, disturbs=again or late or not several)


def _sends_heartbeats(job: Job, agent: Agent) -> bool:
    """Whether the server has heard of the node as lately as it should."""
    if not (agent.alive and agent.connected and isinstance(agent.link, SimLink)) or agent.link.connection is None:
        return False
    return job.world.now - agent.link.connection.ends[1].arrived_at < job.settings.lease * 0.4


def _worker_failure(_job: Job, agent: Agent, _fault: Fault) -> None:
    agent.workers.fail()


def _agent_kill(job: Job, agent: Agent, _fault: Fault) -> None:
    job.audit.disturb(agent.number)
    agent.kill()
    _disconnect_all(job, agent)


def _domain_killed(job: Job, agent: Agent, fault: Fault) -> None:
    _strike_domain(job, agent, fault, _agent_kill)


def _domain_off(job: Job, agent: Agent, fault: Fault) -> None:
    _strike_domain(job, agent, fault, _power_off)


def _strike_domain(job: Job, agent: Agent, fault: Fault, how: Callable[[Job, Agent, Fault], None]) -> None:
    """All nodes of its domain are lost at once."""
    for each in list(job.agents.values()):
        if each.plan.domain == agent.plan.domain and each.process.alive:
            how(job, each, fault)


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


def _preempt_job(job: Job, agent: Agent, fault: Fault) -> None:
    job.audit.preempted = True
    agent.process.hears(agent.preempt, fault.amount)


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
    if job.etcd is not None and _host(job) is agent:
        for number in job.plans:
            job.audit.disturb(number, fault.length)


def _cut(job: Job, number: int, length: float, *, disturbs: bool = True) -> None:
    if disturbs:
        job.audit.disturb(number, length)
    job.cut_until[number] = max(job.cut_until.get(number, 0.0), job.world.now + length)
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


def _etcd_cut(job: Job, agent: Agent, fault: Fault) -> None:
    if job.etcd is None:
        return
    job.cut_from_etcd(agent.number, job.world.now + fault.length)
    job.etcd.cut(agent.number)
    job.world.after(fault.length, job.etcd.heal, agent.number)


def _isolate(job: Job, agent: Agent, fault: Fault) -> None:
    """Cut off from everybody, and from etcd."""
    _etcd_cut(job, agent, fault)
    _cut_one(job, agent, fault)


def _lease_end(job: Job, agent: Agent, _fault: Fault) -> None:
    lease = agent.candidate.lease if agent.candidate is not None else 0
    if job.etcd is not None and lease and not job.etcd.is_away:
        job.etcd.revoke(lease)


def _watch_lost(job: Job, agent: Agent, _fault: Fault) -> None:
    if job.etcd is not None:
        job.etcd.drop_watches(agent.number)


def _clock_jump(_job: Job, agent: Agent, fault: Fault) -> None:
    agent.wall_skew += fault.amount


def _close(_job: Job, agent: Agent, _fault: Fault) -> None:
    agent.close_job()


_ON_NODE: dict[str, Callable[[Job, Agent, Fault], None]] = {
    "worker-failure": _worker_failure,
    "agent-kill": _agent_kill,
    "power-off": _power_off,
    "domain-killed": _domain_killed,
    "domain-off": _domain_off,
    "terminate": _terminate,
    "preempt-job": _preempt_job,
    "agent-pause": _agent_pause,
    "cut": _cut_one,
    "reset": _reset,
    "half-open": _half_open,
    "clock-jump": _clock_jump,
    "close": _close,
    "etcd-cut": _etcd_cut,
    "isolate": _isolate,
    "lease-end": _lease_end,
    "watch-lost": _watch_lost,
}


def _etcd_away(job: Job, etcd: Etcd, fault: Fault) -> None:
    etcd.go_away()
    job.world.after(fault.length, etcd.come_back)


def _etcd_cut_all(job: Job, etcd: Etcd, fault: Fault) -> None:
    """Nobody reaches it, but it is there: leases end."""
    for number in job.plans:
        etcd.cut(number)
        job.world.after(fault.length, etcd.heal, number)


def _etcd_slow(job: Job, etcd: Etcd, fault: Fault) -> None:
    etcd.slow = fault.amount

    def well() -> None:
        etcd.slow = 0.0
        etcd.unsure_until = job.world.now
        etcd.reached()

    job.world.after(fault.length, well)


def _etcd_losing(job: Job, etcd: Etcd, fault: Fault) -> None:
    etcd.losing += 1

    def well() -> None:
        etcd.losing -= 1
        etcd.unsure_until = job.world.now
        etcd.reached()

    job.world.after(fault.length, well)


_ON_ETCD: dict[str, Callable[[Job, Etcd, Fault], None]] = {
    "etcd-away": _etcd_away,
    "etcd-cut-all": _etcd_cut_all,
    "etcd-slow": _etcd_slow,
    "etcd-losing": _etcd_losing,
}

OUTAGES = frozenset(("etcd-away", "etcd-cut-all", "watch-lost", "worker-failure", "clock-jump"))
"""Faults of etcd that are the same for all nodes, and what else makes no node lost."""


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
            job.network.disconnect_all(server.process)
    if job.etcd is None:
        job.world.after(fault.length, _server_back, job)


def _server_back(job: Job) -> None:
    if job.network.listener is None:
        job.new_server()


def _disconnect_all(job: Job, agent: Agent) -> None:
    if agent.server is not None and job.network.listener is agent.server:
        job.network.listener = None
    job.network.disconnect_all(agent.process)


def _host(job: Job) -> Agent | None:
    """The agent in whose process the server lives."""
    if job.server is None:
        return None
    return next((agent for agent in job.agents.values() if agent.process is job.server.process), None)


def _on_host(job: Job, fault: Fault) -> None:
    """What befalls any node befalls the one that was elected."""
    host = _host(job)
    if host is not None and host.process.alive:
        _ON_NODE[fault.kind](job, host, fault)


_ON_SERVER: dict[str, Callable[[Job, Fault], None]] = {
    "server-pause": _server_pause,
    "server-kill": _server_kill,
    "server-power-off": _server_power_off,
}
