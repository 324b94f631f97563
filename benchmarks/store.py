"""The worker store under load: requests a second, latency of a request and of a connect, and a recorded start-up.

Each server runs alone in a process; the load comes from another one, from plain sockets, since the Python threads of
real torch clients cannot keep a server busy. The start-up is what 256 processes of torch sent to their store in
`init_process_group`, sent again by plain sockets.
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
_AS_MANY = Budget(1.05, at_least=True)
_AS_LITTLE = Budget(1.0)


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
    seconds: float
    _servers: dict[str, tuple[Child, int]] = field(default_factory=dict)
    _load: Child | None = None

    def measure(self, side: str, clients: int) -> _Figures:
        """One round: connect, then drive.

        Raises:
            BenchError: the server or the load ended, or did not answer in time.
        """
        server, port = self._server(side)
        if self._load is None:
            self._load = self.children.start("load", program("raw_load"))
            self._answer(self._load, "being ready")
        try:
            return self._drive(self._load, server.pid, port, clients)
        except BenchError:
            self._load = None  # whatever it is in the midst of, later rounds begin with a new one
            raise

    def _server(self, side: str) -> tuple[Child, int]:
        if side not in self._servers:
            child = self.children.start(f"{side} store server", program("store_server", side, "--own-core"))
            line = self._answer(child, "its port")
            self._servers[side] = child, decode(line, Serving).port
        return self._servers[side]

    def _drive(self, load: Child, server_pid: int, port: int, clients: int) -> _Figures:
        connected = self._ask(load, Connect(port, clients, at_least=_CONNECTS), Connected)
        driven = self._ask(load, Drive(self.seconds, server_pid), Driven)
        return _Figures(
            rate=driven.requests / driven.seconds,
            busy=driven.server_seconds / driven.seconds,
            p50=percentile(driven.latencies, 0.5),
            p99=percentile(driven.latencies, 0.99),
            connect_p50=percentile(connected.latencies, 0.5),
            connect_p99=percentile(connected.latencies, 0.99),
            storm=median(connected.storms),
        )

    def _ask(self, load: Child, order: Connect | Drive, answer: type[S]) -> S:
        load.tell(encode(order))
        return decode(self._answer(load, answer.__name__.lower()), answer)

    def _answer(self, child: Child, awaited: str) -> str:
        return self.children.one_line_each([child], time.monotonic() + _TIMEOUT, awaited)[child].text


def _run(settings: Settings) -> list[Row]:
    rows: list[Row] = []
    with Children() as children:
        stage = _Stage(children, _QUICK_SECONDS if settings.quick else _SECONDS)
        for clients in _SIZES:
            sides = {side: partial(stage.measure, side, clients) for side in (OURS, THEIRS)}
            rows.extend(_rows(clients, in_turn(f"store, {clients} clients", settings.rounds, sides)))
    return rows


def _rows(clients: int, turns: Turns[_Figures]) -> list[Row]:
    name = f"store, {clients:,} plain socket{'s' if clients > 1 else ''}"

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
    rows.append(figure("connect p99", "ms", lambda found: found.connect_p99 * 1e3))
    if many:
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


RAW_CASE = Case("store", "the worker store under load from plain sockets", _run)
START_UP_CASE = Case("store-startup", "the worker store at the start of 256 torch processes, recorded", _start_up)
