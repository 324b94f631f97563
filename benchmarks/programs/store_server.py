"""A store server alone in its process: `store_server rallypoint|torch [--own-core]`.

Prints its port; serves until standard input ends. With `--own-core` it keeps to the core that loads keep off.
"""

from __future__ import annotations

import os
import socket
import sys

from benchmarks.messages import Serving, encode
from benchmarks.system import raise_file_limit, server_core

_BACKLOG = 4096  # as ours; the system may cap it


def _serve_ours() -> tuple[int, object]:
    from rallypoint.store.server import StoreServer

    server = StoreServer()
    return server.port, server


def _serve_torch() -> tuple[int, object]:
    from torch.distributed import TCPStore

    # An IPv4 listener, made here: torch's server looks up the name of every peer, and for the IPv4 peers of its usual
    # dual-stack socket (::ffff:127.0.0.1) it asks DNS, whose mood is not what is measured. 127.0.0.1 is in /etc/hosts.
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(_BACKLOG)
    port: int = listener.getsockname()[1]
    server = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, use_libuv=True, master_listen_fd=listener.detach()
    )
    return port, server


_SERVERS = {"rallypoint": _serve_ours, "torch": _serve_torch}


def main(kind: str, *options: str) -> None:
    """Serve until standard input ends."""
    raise_file_limit()
    if "--own-core" in options:
        os.sched_setaffinity(0, server_core())  # before there are threads
    port, server = _SERVERS[kind]()
    print(encode(Serving(port)).decode(), flush=True)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main(*sys.argv[1:])
