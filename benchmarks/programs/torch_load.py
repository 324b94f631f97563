"""Load on a store from real torch clients, one thread each.

Reads `Connect` and `Drive` lines from standard input in turn and answers each; ends when standard input does. The
calls of a cycle put the same requests on the wire as `raw_wire.steps`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import TCPStore

from benchmarks.messages import WARM_UP, Connect, Connected, Drive, Driven, decode, encode, thinned
from benchmarks.system import ProcessClock, raise_file_limit

_TIMEOUT = timedelta(seconds=60)
_VALUE = bytes(range(64))
_REQUESTS = (1, 2, 1, 1)  # of set, get (WAIT and GET), add and check
_FIRST_SINGLE = 2  # from here on a call is one round trip


@dataclass(slots=True)
class _Window:
    """The measured time, on the monotonic clock; what begins before or ends after it is not counted."""

    begin: float = 0.0
    end: float = 0.0


@dataclass(slots=True)
class _Client:
    """One thread's store and what it saw."""

    number: int
    store: TCPStore | None = None
    connect_seconds: float = 0.0
    requests: int = 0
    latencies: list[float] = field(default_factory=list)
    error: Exception | None = None

    def connect(self, port: int) -> None:
        begin = time.perf_counter()
        self.store = TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=_TIMEOUT)
        self.connect_seconds = time.perf_counter() - begin

    def drive(self, window: _Window) -> None:
        """Cycle until the window's end. A `get` is two requests and two round trips, the others are one each."""
        clock, store, key = time.monotonic, self.store, f"bench/{self.number}"
        assert store is not None
        moments = [clock()] * 5
        while moments[0] < window.end:
            store.set(key, _VALUE)
            moments[1] = clock()
            found = store.get(key)
            moments[2] = clock()
            store.add("bench/counter", 1)
            moments[3] = clock()
            present = store.check([key])
            moments[4] = clock()
            if found != _VALUE or not present:
                raise ValueError(f"the store lost {key!r}: it gave {found!r}, and present is {present}")
            self._count(moments, window)
            moments[0] = moments[4]

    def _count(self, moments: list[float], window: _Window) -> None:
        for call, requests in enumerate(_REQUESTS):
            if moments[call] >= window.begin and moments[call + 1] <= window.end:
                self.requests += requests
                if call >= _FIRST_SINGLE:
                    self.latencies.append(moments[call + 1] - moments[call])


def _all_at_once(
    clients: list[_Client], action: Callable[[_Client], None], start: Callable[[], None] = lambda: None
) -> float:
    """Run `action` for each client on a thread of its own, all released together; seconds until the last is done.

    `start` is called when all threads wait, just before they are released. Raises a client's error if one failed.
    """
    go = threading.Event()

    def run(client: _Client) -> None:
        go.wait()
        try:
            action(client)
        except Exception as error:
            client.error = error

    threads = [threading.Thread(target=run, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    start()
    begin = time.perf_counter()
    go.set()
    for thread in threads:
        thread.join()
    for client in clients:
        if client.error is not None:
            raise client.error
    return time.perf_counter() - begin


def connect(order: Connect) -> tuple[list[_Client], Connected]:
    """Storms of connects until there are latencies enough; the last storm's clients stay."""
    latencies: list[float] = []
    storms: list[float] = []
    while True:
        clients = [_Client(order.first_client + i) for i in range(order.clients)]
        storms.append(_all_at_once(clients, lambda client: client.connect(order.port)))
        latencies.extend(client.connect_seconds for client in clients)
        if len(latencies) >= order.at_least:
            return clients, Connected(latencies, storms)


def drive(clients: list[_Client], order: Drive) -> Driven:
    """Warm up, then measure."""
    server = ProcessClock(order.server_pid)
    window = _Window()
    used: list[float] = []
    timer = threading.Timer(order.seconds * WARM_UP, lambda: used.append(server.seconds()))

    def start() -> None:
        timer.start()
        window.begin = time.monotonic() + order.seconds * WARM_UP
        window.end = window.begin + order.seconds

    _all_at_once(clients, lambda client: client.drive(window), start)
    timer.join()
    latencies = [latency for client in clients for latency in client.latencies]
    requests = sum(client.requests for client in clients)
    return Driven(requests, order.seconds, thinned(latencies), server.seconds() - used[0])


def main() -> None:
    """Serve pairs of `Connect` and `Drive` lines until standard input ends."""
    raise_file_limit()
    # A torch client asks DNS for the name of its peer, IPv4 written as IPv6, at each connect; do not wait 5 s for that.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    print("ready", flush=True)
    for line in sys.stdin:
        clients, connected = connect(decode(line, Connect))
        print(encode(connected).decode(), flush=True)
        print(encode(drive(clients, decode(sys.stdin.readline(), Drive))).decode(), flush=True)
        clients.clear()


if __name__ == "__main__":
    main()
