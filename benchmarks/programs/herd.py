"""Very many clients of a store, who all say the same at the same time: plain sockets and one epoll, in C (`herd.c`).

Reads an `Assemble` line and then `Converse` lines from standard input and answers each; ends when standard input does.
"""

from __future__ import annotations

import ctypes
import os
import select
import sys
from pathlib import Path

from benchmarks.messages import Answered, Assemble, Converse, decode, encode
from benchmarks.programs import raw_drive
from benchmarks.programs.raw_wire import LoadError
from benchmarks.system import load_cores, raise_file_limit


def library() -> ctypes.CDLL:
    """The C part. Raises LoadError: there is no compiler."""
    built = raw_drive.build(Path(__file__).with_suffix(".c"))
    if built is None:
        raise LoadError("a herd is in C, and there is no compiler that can build it")
    return built


def main() -> None:
    """Answer lines until standard input ends."""
    raise_file_limit()
    os.sched_setaffinity(0, load_cores())
    herd, ended = library(), ctypes.c_double()
    print("ready", flush=True)
    order = decode(sys.stdin.readline(), Assemble)
    epoll, count = select.epoll(), order.clients
    clients, missing = (ctypes.c_int * count)(), (ctypes.c_int * count)()
    last = ctypes.byref(ended)
    greeting = order.greeting, len(order.greeting), order.reply
    _answer(herd.assemble(epoll.fileno(), order.first, count, order.port, *greeting, clients, missing, last), ended)
    for line in sys.stdin:
        said = decode(line, Converse)
        message = said.message, len(said.message), said.reply
        _answer(herd.converse(epoll.fileno(), count, *message, clients, missing, last), ended)


def _answer(failure: int, ended: ctypes.c_double) -> None:
    if failure:
        raise LoadError(raw_drive.FAILURES[failure])
    print(encode(Answered(ended.value)).decode(), flush=True)


if __name__ == "__main__":
    main()
