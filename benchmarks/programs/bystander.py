"""One more client of a store, which gets a key every millisecond, whatever all others do (`look_on` in `herd.c`).

Reads a `LookOn` line from standard input, and answers it as soon as there is the next line, again and again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket

from benchmarks.messages import LookedOn, LookOn, decode, encode
from benchmarks.programs import raw_drive
from benchmarks.programs.herd import library
from benchmarks.programs.raw_wire import LoadError, handshake, steps
from benchmarks.system import ProcessClock, load_cores

_MOST = 600_000


def main() -> None:
    """Answer lines until standard input ends."""
    os.sched_setaffinity(0, load_cores())
    with contextlib.suppress(PermissionError):  # else it waits for the herd, which uses the same processors
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    herd = library()
    waits, servers = (ctypes.c_float * _MOST)(), (ctypes.c_float * _MOST)()
    put, get = steps(-1)[:2]
    print("ready", flush=True)
    while line := os.read(0, 4096).decode():  # not by lines: the end of the look is seen on the descriptor
        order = decode(line, LookOn)
        hello = handshake(1)
        with socket.create_connection(("127.0.0.1", order.port)) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.sendall(hello.message + put.message)
            assert client.recv(4, socket.MSG_WAITALL) == hello.reply
            assert client.recv(1) == put.reply
            print("ready", flush=True)
            server = ProcessClock(order.server_pid).id
            message = get.message, len(get.message), get.reply_length
            count = herd.look_on(client.fileno(), 0, server, *message, waits, servers, ctypes.c_long(_MOST))
        if count < 0:
            raise LoadError(raw_drive.FAILURES[count])
        os.read(0, 4096)
        print(encode(LookedOn(count, max(waits[:count]), max(servers[:count]))).decode(), flush=True)


if __name__ == "__main__":
    main()
