"""A rendezvous backend of a third party, written for torch: two nodes meet over what is in this process's memory."""

import json
import threading
from typing import Any

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    Token,
    create_handler,
)


class Memory(RendezvousBackend):
    """The state with a number, which is its token."""

    lock = threading.Lock()
    state: tuple[bytes, int] | None = None

    @property
    def name(self) -> str:
        return "memory"

    def get_state(self) -> tuple[bytes, Token] | None:
        with Memory.lock:
            return Memory.state

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        assert isinstance(state, bytes)
        with Memory.lock:
            had = None if Memory.state is None else Memory.state[1]
            if token != had:
                return None if Memory.state is None else (*Memory.state, False)
            Memory.state = (state, (had or 0) + 1)
            return (*Memory.state, True)


def node(make: Any, told: list[Any]) -> None:
    handler = make()
    info = handler.next_rendezvous()
    info.store.set(f"from {info.rank}", str(info.rank))
    heard = [info.store.get(f"from {rank}").decode() for rank in range(info.world_size)]
    told.append([info.rank, info.world_size, heard, handler.get_backend(), handler.get_run_id(), handler.is_closed()])
    seen.wait()
    if info.rank == 0:
        handler.set_closed()
    done.wait()
    handler.shutdown()


seen = threading.Barrier(2)
done = threading.Barrier(2)


def main() -> None:
    store = HashStore()
    params = RendezvousParameters("memory", "", "job", 2, 2, local_addr="localhost", last_call_timeout="1")
    ways = [
        lambda: create_handler(store, Memory(), params),
        lambda: DynamicRendezvousHandler.from_backend(
            "job", store, Memory(), 2, 2, local_addr="localhost", timeout=RendezvousTimeout()
        ),
    ]
    settings = ways[1]().settings
    told: list[Any] = []
    threads = [threading.Thread(target=node, args=(way, told)) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        create_handler(store, Memory(), params).next_rendezvous()
        closed = False
    except RendezvousClosedError:
        closed = True
    times = [settings.timeout.join.total_seconds(), settings.keep_alive_interval.total_seconds()]
    print(json.dumps([sorted(told), closed, times, settings.min_nodes, settings.run_id]))


main()
