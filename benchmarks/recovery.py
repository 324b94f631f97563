"""What a job of three nodes, two of which suffice, needs to continue when a node is lost, leaves or comes; and ^C.

Every figure but that of ^C is the time from the event to the first line of the last new worker. The workers only wait:
none of them notices that another is gone, so torchrun does not come back from some of these. It is given `_TIMEOUT`
once, and the table says `not within ...`.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

from tests.faults.network import Network, network, why_not

from benchmarks.case import OURS, THEIRS, BenchError, Budget, Case, Row, Settings, in_turn, row, sample
from benchmarks.children import Child, Children, descendants
from benchmarks.jobs import first_lines, free_port, start_node, start_single

_TIMEOUT, _TIMEOUT_QUICK = 120.0, 3.0
"""Seconds for workers to come back; torchrun needs 45 where its workers notice the loss, most of it its last call."""
_LEASE = 3.0
_NODES = 3
_NNODES = f"2:{_NODES}"

Measure = Callable[[str, float], float]
"""From a side and a timeout (seconds) to the seconds that were measured."""


class NeverError(BenchError):
    """What is timed did not happen."""


class Nodes:
    """The agents of one job, on loopback or on hosts of their own; the first hosts the control plane."""

    def __init__(self, side: str, count: int, timeout: float, net: Network | None = None, conf: str = "") -> None:
        self.children = Children()
        self._side, self._timeout, self._net, self._conf = side, timeout, net, conf
        place = net.hosts[0].address if net else "127.0.0.1"
        self._endpoint = f"{place}:{free_port()}"
        self.agents: list[Child] = []
        self._old: set[int] = set()
        with ExitStack() as undo:
            undo.push(self.children)
            for _ in range(count):
                self.start()
            self.old_are_up(count)
            undo.pop_all()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.children.__exit__(None, None, None)

    def start(self) -> None:
        """Start one more agent."""
        number = len(self.agents)
        conf = [f"is_host={str(number == 0).lower()}", *([self._conf] if self._conf else [])]
        entry = self._net.hosts[number].entry if self._net else ()
        self.agents.append(
            start_node(self.children, self._side, number, _NNODES, self._endpoint, ",".join(conf), entry)
        )

    def old_are_up(self, count: int) -> None:
        """Wait for the first workers, whose lines will not count."""
        self._old = {worker.pid for worker in first_lines(self.children, count)}

    def back_after(self, event: float, count: int) -> float:
        """Seconds from a moment until `count` new workers have said their line.

        Raises:
            NeverError: they do not.
        """
        try:
            return max(worker.at for worker in first_lines(self.children, count, self._old, self._timeout)) - event
        except BenchError as error:
            if self._side == OURS:
                raise
            waited = time.monotonic() - event
            raise NeverError(
                f"not within {waited:.0f} s" if waited >= self._timeout else "not at all: the job ended"
            ) from error


def agent_gone(number: signal.Signals, side: str, timeout: float) -> float:
    """Seconds until two agents of three have new workers, after a signal to the third."""
    with Nodes(side, _NODES, timeout) as nodes:
        leaver = nodes.agents[-1]
        nodes.children.expect_end(leaver)
        at = time.monotonic()
        leaver.process.send_signal(number)
        return nodes.back_after(at, _NODES - 1)


def _agent_comes(side: str, timeout: float) -> float:
    with Nodes(side, _NODES - 1, timeout, conf="last_call_timeout=1") as nodes:
        at = time.monotonic()
        nodes.start()
        return nodes.back_after(at, _NODES)


def _link_down(side: str, timeout: float) -> float:
    with network(*(f"n{number}" for number in range(_NODES))) as net, Nodes(side, _NODES, timeout, net) as nodes:
        at = time.monotonic()
        with net.hosts[-1].unplugged():
            return nodes.back_after(at, _NODES - 1)


def _interrupt(side: str, timeout: float) -> float:
    """^C as a terminal sends it: to the launcher's process group."""
    with Children() as children:
        agent = start_single(children, side)
        first_lines(children, 2)
        watched = {os.pidfd_open(pid) for pid in [agent.pid, *descendants(agent.pid)]}
        children.expect_end(agent)
        at = time.monotonic()
        os.killpg(agent.pid, signal.SIGINT)
        try:
            _wait_for_all(watched, at + timeout)
        finally:
            for fd in watched:
                os.close(fd)
        return time.monotonic() - at


def _wait_for_all(pidfds: set[int], deadline: float) -> None:
    left = set(pidfds)
    while left:
        ended, _, _ = select.select(left, [], [], max(0.0, deadline - time.monotonic()))
        if not ended:
            raise NeverError(f"not within the time: {len(left)} processes outlived ^C")
        left -= set(ended)


def _case(name: str, what: str, measure: Measure, budget: Budget | None = None, *, needs_network: bool = False) -> Case:
    def run(settings: Settings) -> list[Row]:
        if needs_network and (reason := why_not()) is not None:
            return [Row(what, "s", None, None, budget, remarks=(f"not measured: {reason}",))]
        timeout = {OURS: _TIMEOUT, THEIRS: _TIMEOUT_QUICK if settings.quick else _TIMEOUT}
        turns = in_turn(name, settings.rounds, {side: partial(measure, side, timeout[side]) for side in timeout})
        never = turns.failures.get(THEIRS, "")
        if never.startswith("not "):
            return [
                Row(what, "s", sample(turns.results[OURS]), None, budget, never=never, remarks=_ours(turns.failures))
            ]
        return [row(what, "s", turns, budget)]

    return Case(name, what, run)


def _ours(failures: Mapping[str, str]) -> tuple[str, ...]:
    return (f"{OURS} not measured: {failures[OURS]}",) if OURS in failures else ()


CASES = (
    _case(
        "agent-killed",
        "agent SIGKILL to survivors' new workers' first line",
        partial(agent_gone, signal.SIGKILL),
        Budget(0.05, unit="s"),
    ),
    _case(
        "link-down",
        f"link down to the same (lease {_LEASE:.0f} s)",
        _link_down,
        Budget(_LEASE + 0.5, unit="s"),
        needs_network=True,
    ),
    _case("scale-down", "agent SIGTERM to the others' new workers' first line", partial(agent_gone, signal.SIGTERM)),
    _case("scale-up", "third agent's start to all new workers' first line", _agent_comes),
    _case("interrupt", "^C to the end of the last process, one node", _interrupt),
)
