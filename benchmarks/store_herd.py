"""The worker store with as many clients as a job of the largest size has, all of whom say the same at the same time.

The server is alone in its process, on a core of its own; the clients are plain sockets in others (`programs.herd`).
Four phases: all connect; each adds to a counter; each arrives at a barrier, which is to add and to wait for a key; that
key is set. One more client gets a key every millisecond (`programs.bystander`), and tells how long it waited in each.

The same is done with the largest number by the store alone, without a kernel (`programs/store_alone.c`).
"""

from __future__ import annotations

import resource
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import build_native

from benchmarks.case import OURS, BenchError, Budget, Case, Row, Settings, Turns, in_turn, row
from benchmarks.children import Child, Children, program
from benchmarks.messages import Answered, Assemble, Converse, LookedOn, LookOn, Serving, decode, encode
from benchmarks.programs import raw_drive
from benchmarks.programs.raw_wire import COUNTER, handshake
from benchmarks.system import ProcessClock

_ALONE = Path(raw_drive.__file__).with_name("store_alone.c")
_SIZES = (16_384, 100_000)
_QUICK_SIZES = (256, 1024)
_SPARE = 1000  # descriptors that a process needs besides those of clients
_EACH = 16_384  # clients of one process at most
_TIMEOUT = 300.0
_PHASES = {
    "all connect": None,
    "each adds": None,
    "each arrives at a barrier": None,
    "the barrier is over": Budget(10.0, unit="ms"),
}
"""What is measured, and how long a bystander may wait for a request that is not its own: where all ask at once, it has
to wait for its turn.
"""


@dataclass(frozen=True, slots=True)
class _Phase:
    """What one phase cost. Seconds."""

    seconds: float
    """Until the last client had its reply."""
    processor: float
    """The server's, in all."""
    wait: float
    """The bystander's longest."""
    server_wait: float
    """The same in processor time of the server."""
    turn: float
    """The longest turn of the server's loop, in its processor time."""


_Figures = Mapping[str, _Phase]


def _run(settings: Settings) -> list[Row]:
    rows: list[Row] = []
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1] - _SPARE
    for wanted in _QUICK_SIZES if settings.quick else _SIZES:
        clients = min(wanted, most)
        turns = in_turn(f"store, a herd of {clients}", settings.rounds, {OURS: partial(_herded, clients)})
        few = f"{wanted:,} were wanted: a process here may have {most + _SPARE:,} open files (`ulimit -Hn`)"
        rows += _rows(clients, turns, (few,) if clients < wanted else ())
    most = max(_QUICK_SIZES if settings.quick else _SIZES)
    return rows + _alone_rows(most, in_turn("the store alone", settings.rounds, {OURS: partial(_alone, most)}))


def _rows(clients: int, turns: Turns[_Figures], remarks: tuple[str, ...]) -> list[Row]:
    def figure(phase: str, what: str, unit: str, pick: Callable[[_Phase], float], budget: Budget | None = None) -> Row:
        values = {side: [pick(found[phase]) for found in results] for side, results in turns.results.items()}
        name = f"store, a herd of {clients:,}, {phase}: {what}"
        return row(name, unit, Turns(values, turns.failures), budget, remarks)

    return [
        made
        for phase, limit in _PHASES.items()
        for made in (
            figure(phase, "last reply", "s", lambda found: found.seconds),
            figure(phase, "server's processor time a client", "µs", lambda found: found.processor / clients * 1e6),
            figure(phase, "a bystander's longest wait", "ms", lambda found: found.wait * 1e3),
            figure(phase, "the same in server's processor time", "ms", lambda found: found.server_wait * 1e3, limit),
            figure(phase, "longest turn of the server's loop", "ms", lambda found: found.turn * 1e3),
        )
    ]


def _herded(clients: int) -> _Figures:
    """One herd, on a server of its own."""
    with Children() as children, tempfile.TemporaryDirectory() as folder:
        return _Field(children, Path(folder), clients).play()


def _alone_rows(clients: int, turns: Turns[list[tuple[float, float]]]) -> list[Row]:
    def figure(number: int, part: int, what: str, unit: str, scale: float) -> Row:
        values = {side: [found[number][part] / scale for found in results] for side, results in turns.results.items()}
        name = f"store alone, without a kernel, {clients:,} clients, {list(_PHASES)[number]}: {what}"
        return row(name, unit, Turns(values, turns.failures))

    return [
        made
        for number in range(1, len(_PHASES))  # they are connected before
        for made in (
            figure(number, 0, "processor time a client", "µs", 1e3),
            figure(number, 1, "longest turn", "ms", 1e6),
        )
    ]


def _alone(clients: int) -> list[tuple[float, float]]:
    """For each phase nanoseconds a client, and of the longest turn. Raises BenchError: it cannot be built."""
    sources = [str(path) for path in build_native.SOURCES.glob("*.c") if path.name != "module.c"]
    replaced = [f"-D{name}=no_{name}" for name in ("epoll_ctl", "epoll_wait", "recv", "send", "close")]
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/alone"
        built = ["cc", "-std=c11", "-O2", f"-I{build_native.SOURCES}", *replaced, *sources, str(_ALONE), "-o", program]
        try:
            subprocess.run(built, check=True, capture_output=True)
            said = subprocess.run([program, str(clients)], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise BenchError(f"the store alone: {error}") from None
    return [(float(each), float(longest)) for each, longest in map(str.split, said.stdout.splitlines())]


class _Field:
    """One server, its herd and its bystander."""

    def __init__(self, children: Children, folder: Path, clients: int) -> None:
        self._children = children
        preloaded = _turn_clock(folder)
        self._longest = folder / "longest"
        self._longest.write_bytes(bytes(8))
        environment = {"LD_PRELOAD": str(preloaded), "TURN_CLOCK": str(self._longest)}
        self._server = children.start("store server", program("store_server", OURS, "--own-core"), environment)
        self._port = decode(self._answer(self._server, "its port"), Serving).port
        self._shares = [min(_EACH, clients - first) for first in range(0, clients, _EACH)]
        self._herds = [children.start(f"herd {number}", program("herd")) for number in range(len(self._shares))]
        self._bystander = children.start("bystander", program("bystander"))
        children.one_line_each([*self._herds, self._bystander], time.monotonic() + _TIMEOUT, "being ready")
        self._clients = clients
        self._found: dict[str, _Phase] = {}

    def play(self) -> _Figures:
        hello = handshake(1)
        counter, gate = _text(COUNTER), _text(b"/bench/gate")
        add = b"\x04" + counter + struct.pack("<q", 1)
        wait = b"\x06" + struct.pack("<Q", 1) + gate
        with self._phase("all connect"):
            for number, (herd, share) in enumerate(zip(self._herds, self._shares, strict=True)):
                greeting = hello.message, hello.reply_length
                herd.tell(encode(Assemble(self._port, number * _EACH, share, *greeting)))
        with self._phase("each adds"):
            self._converse(add, 8)
        with self._phase("each arrives at a barrier"):
            self._converse(add + wait, 8)
        with socket.create_connection(("127.0.0.1", self._port)) as last, self._phase("the barrier is over"):
            self._converse(b"", 1)
            last.sendall(hello.message + b"\x01" + gate + _text(b"open"))
        return self._found

    def _converse(self, message: bytes, reply: int) -> None:
        for herd in self._herds:
            herd.tell(encode(Converse(message, reply)))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """What is told to the herd in this block, until all are answered."""
        self._bystander.tell(encode(LookOn(self._port, self._server.pid)))
        self._answer(self._bystander, "the bystander")
        with self._longest.open("r+b") as file:  # never shorter, for the server has it in memory
            file.write(bytes(8))
        clock = ProcessClock(self._server.pid)
        used, began = clock.seconds(), time.monotonic()
        yield
        lines = self._children.one_line_each(self._herds, time.monotonic() + _TIMEOUT, name)
        ended = max(decode(line.text, Answered).at for line in lines.values())
        used = clock.seconds() - used
        self._bystander.tell(b"enough")
        seen = decode(self._answer(self._bystander, "what it saw"), LookedOn)
        (turn,) = struct.unpack("<Q", self._longest.read_bytes())
        self._found[name] = _Phase(ended - began, used, seen.wait, seen.server, turn / 1e9)

    def _answer(self, child: Child, awaited: str) -> str:
        return self._children.one_line_each([child], time.monotonic() + _TIMEOUT, awaited)[child].text


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _turn_clock(folder: Path) -> Path:
    """What a server is started with that is to say how long its turns are. Raises BenchError: there is no compiler."""
    built = folder / "turn_clock.so"
    if not raw_drive.compile_library(Path(raw_drive.__file__).with_name("turn_clock.c"), str(built)):
        raise BenchError("a herd is in C, and there is no compiler that can build it")
    return built


CASE = Case("store-herd", "the worker store with 16,384 and 100,000 clients that say the same at the same time", _run)
