"""What a secret and TLS cost: a start of two nodes, their agents' memory, and many nodes that meet and send heartbeats.

The three sides are ours: open, with a secret, with TLS. The worker store is no part of it: neither touches that.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from benchmarks.case import OURS, Case, Row, Settings, Turns, in_turn, sample
from benchmarks.children import Children
from benchmarks.jobs import first_lines, free_port, start_node
from benchmarks.memory import of_agent
from benchmarks.messages import Protected
from benchmarks.protected import conf_of, make_certificates
from benchmarks.scale import Figures, gather
from rallypoint.base.secrets import new_secret

T = TypeVar("T")

_OPEN, _SECRET, _TLS = "open", "with a secret", "with TLS"
_NODES, _QUICK_NODES = 1024, 64
_SECONDS, _QUICK_SECONDS = 5.0, 1.0  # of heartbeats
_SETTLE = 1.0  # seconds after the last worker's line: what an agent still does then is its idle life


class _Start(NamedTuple):
    seconds: float
    """From the first command to the first line of the last worker."""
    memory: float
    """MB of both agents, helpers included."""


def _run(settings: Settings) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        make_certificates(Path(folder))
        sides = {_OPEN: Protected(), _SECRET: Protected(new_secret()), _TLS: Protected(certificates=folder)}
        starts = {side: partial(_start, protected) for side, protected in sides.items()}
        started = in_turn("start of 2 nodes", settings.rounds, starts, warm_up=True)
        nodes, seconds = (_QUICK_NODES, _QUICK_SECONDS) if settings.quick else (_NODES, _SECONDS)
        crowds = {side: partial(gather, nodes, seconds, protected) for side, protected in sides.items()}
        met = in_turn(f"{nodes} nodes", settings.rounds, crowds)
    return [*_start_rows(started), *_crowd_rows(f"{nodes:,} nodes", met)]


def _start(protected: Protected) -> _Start:
    env = {"RALLYPOINT_SECRET": protected.secret} if protected.secret else {}
    with Children() as children:
        endpoint, conf = f"127.0.0.1:{free_port()}", conf_of(protected)
        agents = [start_node(children, OURS, node, "2", endpoint, conf, env=env) for node in range(2)]
        workers = first_lines(children, 2)
        seconds = max(worker.at for worker in workers) - agents[0].started
        time.sleep(_SETTLE)
        pids = {worker.pid for worker in workers}
        return _Start(seconds, sum(of_agent(agent.pid, pids).resident for agent in agents))


def _start_rows(turns: Turns[_Start]) -> list[Row]:
    return [
        *_rows("two nodes, command to last first line", "s", turns, lambda one: one.seconds),
        *_rows("two agents, resident memory", "MB", turns, lambda one: one.memory),
    ]


def _crowd_rows(name: str, turns: Turns[Figures]) -> list[Row]:
    return [
        *_rows(f"{name}: first connect to last place", "s", turns, lambda one: one.seconds),
        *_rows(f"{name}: server's processor time a node", "µs", turns, lambda one: one.processor * 1e6),
        *_rows(f"{name}: server's memory a node", "KB", turns, lambda one: one.memory / 1e3),
        *_rows(f"{name}: bytes a node", "B", turns, lambda one: one.bytes),
        *_rows(f"{name}: server's share of a core for heartbeats", "%", turns, lambda one: one.heartbeat_load * 100),
    ]


def _rows(what: str, unit: str, turns: Turns[T], pick: Callable[[T], float]) -> list[Row]:
    """A row for each protection, beside the open side's figure."""
    found = {side: sample([pick(one) for one in results]) for side, results in turns.results.items()}
    sides = (_SECRET, _TLS)
    return [
        Row(f"{what}, {side}", unit, found[side], found[_OPEN], base_name=_OPEN, remarks=turns.remarks())
        for side in sides
    ]


CASE = Case("protection", "what a secret and TLS cost", _run, rounds=5)
