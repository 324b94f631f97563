"""The worker store under load: requests a second, latency of a request and of a connect, and a recorded start-up.

Each server runs alone in a process; the load comes from other processes. Two kinds of load make the same requests:
plain sockets, which can keep a server busy, and real torch clients, whose Python threads mostly cannot. The start-up is
what 256 processes of torch said to their store in `init_process_group`, said again by plain sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

from benchmarks.case import (
    OURS,
    THEIRS,
    BenchError,
    Budget,
    Case,
    Row,
    Settings,
    Turns,
    in_turn,
    percentile,
    row,
)
from benchmarks.children import Child, Children, program
from benchmarks.messages import Connect, Connected, Drive, Driven, Replay, Replayed, S, Serving, decode, encode

_SIZES = (1, 64, 1024, 4096)
_CONNECTS = 200  # connect latencies a round, at least
_SECONDS = 2.0
_QUICK_SECONDS = 0.5
_TIMEOUT = 120.0  # seconds for any one answer
_BUSY = 0.9  # a server that uses less than this share of a core was not the bottleneck
_NOT_BUSY = (
    "so the load, or what else ran on this machine, was the bottleneck: compare the processor time a request instead"
)
_AS_MANY = Budget(1.0, at_least=True)
_AS_LITTLE = Budget(1.0)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of load: its program, what tables call it, and over how many processes it is spread at most."""

    program: str
    label: str
    processes: int


_RAW = _Kind("raw_load", "plain socket", 1)
_TORCH = _Kind("torch_load", "torch client", 4)


@dataclass(frozen=True, slots=True)
class _Figures:
    """One round of one size on one server."""

    rate: float
    """Requests a second."""
    busy: float
    """Share of one core that the server used."""
    p50: float
    """Seconds of a round trip, as the next; then of one connect until its PING was answered."""
    p99: float
    connect_p50: float
    connect_p99: float
    storm: float
    """Seconds from the start of all connects at once until the last was answered."""


@dataclass
class _Stage:
    """Both servers and the programs that load them; each is started when first needed and kept."""

    children: Children
    kind: _Kind
    seconds: float
    _servers: dict[str, tuple[Child, int]] = field(default_factory=dict)
    _loads: list[Child] = field(default_factory=list)

    def measure(self, side: str, clients: int) -> _Figures:
        """One round: connect, then drive.

        Raises:
            BenchError: the server or the load ended, or did not answer in time.
        """
        server, port = self._server(side)
        try:
            loads = self._load_programs(min(self.kind.processes, clients))
            return self._drive(loads, server.pid, port, clients)
        except BenchError:
            self._loads.clear()  # whatever they are in the midst of, later rounds begin with new ones
            raise

    def _server(self, side: str) -> tuple[Child, int]:
        if side not in self._servers:
            child = self.children.start(f"{side} store server", program("store_server", side, "--own-core"))
            line = self._answers([child], "its port")[child]
            self._servers[side] = child, decode(line, Serving).port
        return self._servers[side]

    def _load_programs(self, count: int) -> list[Child]:
        new = [
            self.children.start(f"load {number}", program(self.kind.program))
            for number in range(len(self._loads), count)
        ]
        self._answers(new, "being ready")
        self._loads.extend(new)
        return self._loads[:count]

    def _drive(self, loads: list[Child], server_pid: int, port: int, clients: int) -> _Figures:
        shares = [clients // len(loads)] * len(loads)
        connects = {
            load: Connect(port, share, first_client=number * share, at_least=_CONNECTS // len(loads))
            for number, (load, share) in enumerate(zip(loads, shares, strict=True))
        }
        connected = self._ask(connects, Connected)
        driven = self._ask(dict.fromkeys(loads, Drive(self.seconds, server_pid)), Driven)
        latencies = [latency for report in driven for latency in report.latencies]
        connect_latencies = [latency for report in connected for latency in report.latencies]
        return _Figures(
            rate=sum(report.requests / report.seconds for report in driven),
            busy=median([report.server_seconds / report.seconds for report in driven]),
            p50=percentile(latencies, 0.5),
            p99=percentile(latencies, 0.99),
            connect_p50=percentile(connect_latencies, 0.5),
            connect_p99=percentile(connect_latencies, 0.99),
            storm=median([storm for report in connected for storm in report.storms]),
        )

    def _ask(self, orders: dict[Child, Connect] | dict[Child, Drive], answer: type[S]) -> list[S]:
        for load, order in orders.items():
            load.tell(encode(order))
        return [decode(line, answer) for line in self._answers(list(orders), answer.__name__.lower()).values()]

    def _answers(self, children: list[Child], awaited: str) -> dict[Child, str]:
        lines = self.children.one_line_each(children, time.monotonic() + _TIMEOUT, awaited)
        return {child: line.text for child, line in lines.items()}


def _run(kind: _Kind, settings: Settings) -> list[Row]:
    rows: list[Row] = []
    with Children() as children:
        stage = _Stage(children, kind, _QUICK_SECONDS if settings.quick else _SECONDS)
        for clients in _SIZES:
            sides = {side: partial(stage.measure, side, clients) for side in (OURS, THEIRS)}
            rows.extend(_rows(kind, clients, in_turn(f"store, {clients} x {kind.label}", settings.rounds, sides)))
    return rows


def _rows(kind: _Kind, clients: int, turns: Turns[_Figures]) -> list[Row]:
    name = f"store, {clients:,} {kind.label}{'s' if clients > 1 else ''}"

    def figure(what: str, unit: str, pick: Callable[[_Figures], float], budget: Budget | None = None) -> Row:
        values = {side: [pick(found) for found in results] for side, results in turns.results.items()}
        return row(f"{name}: {what}", unit, Turns(values, turns.failures), budget)

    many = clients > 1
    rate = figure("requests", "/s", lambda found: found.rate, _AS_MANY if many else None)
    rows = [
        _with_remark(rate, turns) if many else rate,
        figure("round trip p50", "ms", lambda found: found.p50 * 1e3),
        figure("round trip p99", "ms", lambda found: found.p99 * 1e3, _AS_LITTLE if many else None),
        figure(
            "server's processor time a request",
            "µs",
            lambda found: found.busy / found.rate * 1e6,
            _AS_LITTLE if many else None,
        ),
        figure("connect p50", "ms", lambda found: found.connect_p50 * 1e3),
    ]
    if kind is _RAW:  # torch clients wait for DNS now and then; only their median means anything
        rows.append(figure("connect p99", "ms", lambda found: found.connect_p99 * 1e3))
    if kind is _RAW and many:
        rows.append(figure("all connected", "ms", lambda found: found.storm * 1e3))
    return rows


def _with_remark(rate: Row, turns: Turns[_Figures]) -> Row:
    busy = {side: median([found.busy for found in results]) for side, results in turns.results.items() if results}
    idle = [f"{side}'s server used {share:.0%} of a core" for side, share in busy.items() if share < _BUSY]
    if not idle:
        return rate
    return replace(rate, remarks=(*rate.remarks, f"{', '.join(idle)}; {_NOT_BUSY}"))


def _start_up(settings: Settings) -> list[Row]:
    turns = in_turn(
        "store, a recorded start-up", settings.rounds, {side: partial(_replayed, side) for side in (OURS, THEIRS)}
    )

    def figure(what: str, unit: str, pick: Callable[[Replayed], float]) -> Row:
        values = {side: [pick(found) for found in results] for side, results in turns.results.items()}
        return row(f"store, start-up of 256 torch processes: {what}", unit, Turns(values, turns.failures), _AS_LITTLE)

    return [
        figure("all that they ask", "s", lambda found: found.seconds),
        figure("round trip p99", "ms", lambda found: percentile(found.latencies, 0.99) * 1e3),
        figure("server's processor time", "s", lambda found: found.server_seconds),
    ]


def _replayed(side: str) -> Replayed:
    """One start-up on a server of its own: it begins without keys."""
    deadline = time.monotonic() + _TIMEOUT
    with Children() as children:
        server = children.start(f"{side} store server", program("store_server", side, "--own-core"))
        port = decode(children.one_line_each([server], deadline, "its port")[server].text, Serving).port
        load = children.start("replay", program("startup_replay"))
        children.one_line_each([load], deadline, "being ready")
        load.tell(encode(Replay(port, server.pid)))
        return decode(children.one_line_each([load], deadline, "the end of the start-up")[load].text, Replayed)


RAW_CASE = Case("store", "the worker store under load from plain sockets", partial(_run, _RAW))
TORCH_CASE = Case("store-torch", "the worker store under load from real torch clients", partial(_run, _TORCH))
START_UP_CASE = Case("store-startup", "the worker store at the start of 256 torch processes, recorded", _start_up)
