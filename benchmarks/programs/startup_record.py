"""Records what the processes of a start-up say to their store: `startup_record RANKS FILE`.

As many processes as asked for call `init_process_group("gloo")`, reduce once, meet at a barrier and leave, as clients
of a store that an agent hosts. torch is imported once and every rank forked from there, so that hundreds fit into one
machine. A relay between them and the store keeps, for each connection, what was sent and how many bytes came back
before more was sent: enough to say the same again (`startup_replay`) to any store.

The benchmark uses what lies in `benchmarks/recorded/`; with this program anybody can make it again.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.recording import Dialogue, Recording, write
from benchmarks.system import raise_file_limit
from rallypoint.store.server import StoreServer

_PIECE = 65536


@dataclass
class _Relayed:
    """One connection of a client, and ours to the store for it."""

    client: socket.socket
    store: socket.socket
    dialogue: Dialogue = field(default_factory=Dialogue)


class _Relay:
    """Passes everything on between clients and a store, and writes it down."""

    def __init__(self, store_port: int) -> None:
        self._store_port = store_port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self.relayed: list[_Relayed] = []

    def run(self) -> None:
        """Until the process ends."""
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._accept()
                else:
                    self._pass_on(key.data, key.fileobj is key.data.client)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        store = socket.create_connection(("127.0.0.1", self._store_port))
        relayed = _Relayed(client, store)
        for end in (client, store):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(end, selectors.EVENT_READ, relayed)
        self.relayed.append(relayed)

    def _pass_on(self, relayed: _Relayed, from_client: bool) -> None:
        source, target = (relayed.client, relayed.store) if from_client else (relayed.store, relayed.client)
        try:
            data = source.recv(_PIECE)
        except ConnectionResetError:
            data = b""
        if not data:
            for end in (relayed.client, relayed.store):
                self._selector.unregister(end)
                end.close()
            return
        if from_client:
            relayed.dialogue.sent(data)
        else:
            relayed.dialogue.came(len(data))
        target.sendall(data)


def _rank(rank: int, ranks: int, port: int) -> None:
    import torch
    from torch import distributed

    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks), RANK=str(rank), LOCAL_RANK=str(rank)
    )
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo")
    distributed.init_process_group("gloo")
    total = torch.ones(1)
    distributed.all_reduce(total)
    distributed.barrier()
    distributed.destroy_process_group()
    os._exit(total.item() != ranks)


def _fork(rank: int, ranks: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        _rank(rank, ranks, port)
    finally:
        os._exit(1)


def main(count: str, path: str) -> None:
    """Record one start-up; raises SystemExit if a rank failed."""
    import torch
    from torch import distributed  # what every rank shares

    raise_file_limit()
    torch.set_num_threads(1)
    assert distributed.is_available()
    ranks = int(count)
    reading, writing = os.pipe()
    ended, end = os.pipe()
    recorder = os.fork()  # before there are threads
    if recorder == 0:
        with StoreServer("127.0.0.1") as server:
            relay = _Relay(server.port)
            threading.Thread(target=relay.run, daemon=True).start()
            os.write(writing, b"%d\n" % relay.port)
            os.read(ended, 1)
            write(Path(path), Recording(ranks, [each.dialogue for each in relay.relayed]))
        os._exit(0)
    port = int(os.read(reading, 16))
    pids = [_fork(rank, ranks, port) for rank in range(ranks)]
    failed = sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)
    os.write(end, b"\n")
    failed += os.waitpid(recorder, 0)[1] != 0
    if failed:
        sys.exit(f"{failed} of {ranks} ranks or their recorder failed; the recording is of no use")


if __name__ == "__main__":
    main(*sys.argv[1:])
