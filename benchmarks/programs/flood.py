"""One connection that sends one message as fast as it can, and reads what is answered.

Reads a line with a `Flood`, greets, prints `ready`, and then floods until the seconds have
passed or the server has disconnected; then it prints `Flooded`.
"""

from __future__ import annotations

import socket
import sys
import time
from contextlib import suppress

from benchmarks.messages import Flood, Flooded, decode, encode

_TIMEOUT = 30.0


def main() -> None:
    """Flood once."""
    order = decode(sys.stdin.readline(), Flood)
    made = socket.create_connection(("127.0.0.1", order.port), _TIMEOUT, (order.source, 0))
    made.sendall(bytes.fromhex(order.greeting))
    made.recv(65536)
    print("ready", flush=True)
    payload = bytes.fromhex(order.payload)
    data = payload * (1 + 65536 // len(payload))
    left, sent = memoryview(data), 0
    made.setblocking(False)
    until = time.monotonic() + order.seconds
    disconnected = False
    while time.monotonic() < until and not disconnected:
        idle = True
        try:
            with suppress(BlockingIOError):
                done = made.send(left)
                left, sent, idle = left[done:] or memoryview(data), sent + done, False
            with suppress(BlockingIOError):
                disconnected, idle = not made.recv(1 << 20), False
        except OSError:
            disconnected = True
        if idle:
            time.sleep(0.0005)
    print(encode(Flooded(sent // len(payload), disconnected)).decode(), flush=True)


if __name__ == "__main__":
    main()
