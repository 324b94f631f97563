"""Torch's store clients and servers beside ours, with the same constructors."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from rallypoint.store.client import TCPStore
from tests.unit.store.both import choose

HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=60)
"""How long anything may take before a test fails."""


def torch_stores() -> Any:
    """torch.distributed, imported when the first test needs it."""
    import torch.distributed

    return torch.distributed


SERVER = """
import sys
from rallypoint.store.server import StoreServer
with StoreServer(sys.argv[1]) as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def serving(kind: str) -> Iterator[int]:
    """A server of torch's or of ours (`ours`, or the one of `KINDS` that is meant); gives its port.

    Ours gets a process of its own, as in life: some of torch's client calls hold the interpreter's lock while they wait
    for the answer, which no Python server in the same process could then give.
    """
    if kind == "torch":
        server = torch_stores().TCPStore(HOST, 0, is_master=True, timeout=TIMEOUT, use_libuv=True)
        yield server.port
        del server
        return
    with pytest.MonkeyPatch.context() as patch:
        if kind != "ours":
            choose(kind, patch)
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    with process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.communicate(timeout=TIMEOUT.total_seconds())
    assert process.returncode == 0


def client(kind: str, port: int, **options: Any) -> Any:
    """A client of torch's or of ours. Both have the methods of contract section 9.5."""
    make = TCPStore if kind == "ours" else torch_stores().TCPStore
    return make(HOST, port, **{"is_master": False, "timeout": TIMEOUT, **options})
