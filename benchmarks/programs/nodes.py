"""Many nodes in one process, a thread each, that take part in one rendezvous: `nodes rallypoint|etcd|torch`.

Reads a `Meet` line, makes the handlers and prints `ready`; reads a `Go` line, joins with all of them and prints `Met`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from benchmarks.messages import Go, Meet, Met, decode, encode
from benchmarks.system import raise_file_limit


class _Info(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...


class _Handler(Protocol):
    def next_rendezvous(self) -> _Info: ...


def _ours(order: Meet) -> _Handler:
    from rallypoint.base.loop import shared_loop
    from rallypoint.rendezvous.handler import get_rendezvous_handler
    from rallypoint.rendezvous.params import RendezvousParameters

    # What handlers import late is imported before the clock starts, as torch's has been.
    import_module("rallypoint.control.client.tcp_link")
    assert shared_loop().loop.is_running()
    endpoint, nodes = f"127.0.0.1:{order.port}", order.all_nodes
    return get_rendezvous_handler(RendezvousParameters("c10d", endpoint, order.run_id, nodes, nodes, is_host="false"))


def _on_etcd(order: Meet) -> _Handler:
    from rallypoint.base.loop import shared_loop
    from rallypoint.rendezvous.handler import get_rendezvous_handler
    from rallypoint.rendezvous.params import RendezvousParameters

    for name in (
        "rallypoint.control.client.tcp_link",
        "rallypoint.control.election.shell",
        "rallypoint.control.etcd.cluster",
    ):
        import_module(name)
    assert shared_loop().loop.is_running()
    endpoint, nodes = f"127.0.0.1:{order.port}", order.all_nodes
    return get_rendezvous_handler(RendezvousParameters("etcd", endpoint, order.run_id, nodes, nodes))


def _torch(order: Meet) -> _Handler:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    endpoint, nodes = f"127.0.0.1:{order.port}", order.all_nodes
    handler: _Handler = get_rendezvous_handler(
        RendezvousParameters("c10d", endpoint, order.run_id, nodes, nodes, is_host="false")
    )
    return handler


_HANDLERS: dict[str, Callable[[Meet], _Handler]] = {"rallypoint": _ours, "etcd": _on_etcd, "torch": _torch}


@dataclass(slots=True)
class _Node:
    """One node's handler and how its rendezvous went."""

    handler: _Handler
    returned: float = 0.0
    info: _Info | None = None
    error: Exception | None = None

    def join(self, go: threading.Event) -> None:
        go.wait()
        try:
            self.info = self.handler.next_rendezvous()
        except Exception as error:
            self.error = error
        self.returned = time.monotonic()


def meet(nodes: list[_Node], at: Callable[[], float]) -> Met:
    """Let all nodes join at the moment that `at` tells once all threads wait.

    Raises what the first failing node raised.
    """
    go = threading.Event()
    threads = [threading.Thread(target=node.join, args=(go,), daemon=True) for node in nodes]
    for thread in threads:
        thread.start()
    time.sleep(max(0.0, at() - time.monotonic()))
    go.set()
    for thread in threads:
        thread.join()
    for node in nodes:
        if node.error is not None:
            raise node.error
    infos = [node.info for node in nodes if node.info is not None]
    return Met([node.returned for node in nodes], [info.rank for info in infos], [info.world_size for info in infos])


def _go() -> float:
    print("ready", flush=True)
    return decode(sys.stdin.readline(), Go).at


def main(kind: str) -> None:
    """Take part in one rendezvous; the process ends with its handlers as they are."""
    raise_file_limit()
    # A torch client asks DNS for the name of its peer, IPv4 written as IPv6, at each connect; do not wait 5 s for that.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    order = decode(sys.stdin.readline(), Meet)
    nodes = [_Node(_HANDLERS[kind](order)) for _ in range(order.nodes)]
    print(encode(meet(nodes, _go)).decode(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
