"""Rendezvous on etcd beside the embedded server, in one run; and how soon a job on etcd continues without an agent.

etcd has three members on loopback, which do not sync to a disk. What its clients say to it is counted by itself.
"""

from __future__ import annotations

import json
import re
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.etcd_client import WritingClient as EtcdClient
from tests.etcd_cluster import EtcdCluster, running

from benchmarks.case import OURS, Case, Row, Settings, in_turn, sample
from benchmarks.children import Child, Children
from benchmarks.jobs import first_lines, start_node
from benchmarks.recovery import agent_gone
from benchmarks.rendezvous import meet, meet_at

_SIZES, _QUICK_SIZES = (8, 64, 256), (8,)
_ETCD, _EMBEDDED = "on etcd", "embedded"
_KEYS = "/rallypoint/bench/"
_SAID = re.compile(rb"^grpc_server_msg_received_total\{.*\} (\S+)$", re.MULTILINE)
_TIMEOUT = 60.0


def _run(settings: Settings) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as etcd:
        for nodes in _QUICK_SIZES if settings.quick else _SIZES:
            rows += _meetings(settings, etcd, nodes)
        rows += _losses(settings, etcd)
    return rows


def _meetings(settings: Settings, etcd: EtcdCluster, nodes: int) -> list[Row]:
    said: list[float] = []
    what = f"rendezvous of {nodes} nodes on etcd"
    sides = {_ETCD: partial(_meet, etcd, nodes, said), _EMBEDDED: partial(meet, OURS, nodes)}
    turns = in_turn(what, settings.rounds, sides)
    times = {side: sample(turns.results[side]) for side in sides}
    return [
        Row(what, "s", times[_ETCD], times[_EMBEDDED], base_name="embedded", remarks=turns.remarks()),
        Row("  messages to etcd for each node", "", sample(said), None),
    ]


def _meet(etcd: EtcdCluster, nodes: int, said: list[float]) -> float:
    """Seconds from the signal until the last node knows its rank."""
    before = _messages(etcd)
    with Children() as children:
        seconds = meet_at(children, "etcd", [each.port for each in etcd.endpoints], nodes)
        said.append((_messages(etcd) - before) / nodes)
    _forget(etcd)
    return seconds


def _messages(etcd: EtcdCluster) -> float:
    """What clients have said to all members so far."""
    return sum(float(each) for member in etcd.members for each in _SAID.findall(member.metrics()))


def _forget(etcd: EtcdCluster) -> None:
    """The nodes ended without leaving: let the next job begin with nothing."""
    client = EtcdClient(etcd.endpoints)
    for lease in {each.lease for each in client.range(_KEYS.encode(), prefix=True).kvs}:
        client.lease_revoke(lease)
    client.delete(_KEYS.encode(), prefix=True)
    client.close()


def _losses(settings: Settings, etcd: EtcdCluster) -> list[Row]:
    rows = []
    for what, of_coordinator in (("agent", False), ("coordinator's agent", True)):
        name = f"{what} SIGKILL to survivors' new workers' first line, on etcd"
        sides: dict[str, Callable[[], float]] = {
            _ETCD: partial(_killed, etcd, of_coordinator),
            _EMBEDDED: partial(agent_gone, signal.SIGKILL, OURS, _TIMEOUT),
        }
        turns = in_turn(name, settings.rounds, sides)
        times = {side: sample(turns.results[side]) for side in sides}
        rows.append(Row(name, "s", times[_ETCD], times[_EMBEDDED], base_name="embedded", remarks=turns.remarks()))
    return rows


def _killed(etcd: EtcdCluster, of_coordinator: bool) -> float:
    endpoints = ",".join(str(each) for each in etcd.endpoints)
    with Children() as children:
        agents = [start_node(children, OURS, each, "2:3", endpoints, backend="etcd") for each in range(3)]
        old = {worker.pid for worker in first_lines(children, 3)}
        coordinator = _coordinator(etcd)
        victim = next(agent for agent in agents if (agent.pid == coordinator) == of_coordinator)
        back = _back(children, victim, old)
    _forget(etcd)
    return back


def _coordinator(etcd: EtcdCluster) -> int:
    """The pid of the agent whose key is the oldest."""
    oldest = etcd.ctl("get", "--prefix", f"{_KEYS}candidates/", "--sort-by=CREATE", "--limit=1", "--print-value-only")
    return int(json.loads(oldest)["pid"])


def _back(children: Children, victim: Child, old: set[int]) -> float:
    children.expect_end(victim)
    at = time.monotonic()
    victim.process.kill()
    return max(worker.at for worker in first_lines(children, 2, old, _TIMEOUT)) - at


CASE = Case("etcd", "rendezvous of 8, 64 and 256 nodes on etcd, and agents killed there", _run)
