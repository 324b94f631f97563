"""A handler that is asked before it has joined anything, over a backend that answers or raises."""

import json
import threading
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    Token,
)


class Memory(RendezvousBackend):
    """The state with a number, which is its token; raises `error` if it has one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.state: tuple[bytes, int] | None = None
        self.lock = threading.Lock()
        self.error = error

    @property
    def name(self) -> str:
        return "memory"

    def get_state(self) -> tuple[bytes, Token] | None:
        if self.error is not None:
            raise self.error
        return self.state

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        if self.error is not None:
            raise self.error
        with self.lock:
            had = None if self.state is None else self.state[1]
            if token != had:
                return None if self.state is None else (*self.state, False)
            self.state = (state, (had or 0) + 1)
            return (*self.state, True)


def handler(backend: Any, least: int = 1) -> Any:
    times = RendezvousTimeout(last_call=timedelta(seconds=1))
    return DynamicRendezvousHandler.from_backend("job", HashStore(), backend, least, 2, "localhost", times)


def said(call: Any) -> Any:
    try:
        return call()
    except Exception as error:
        return [type(error).__name__, str(error)]


def main() -> None:
    told: list[Any] = []
    errors = [RendezvousConnectionError("away"), RendezvousStateError("damaged"), OSError("disk"), KeyError("key")]
    for error in [None, *errors]:
        for name in ("is_closed", "num_nodes_waiting", "set_closed", "shutdown"):
            asked = handler(Memory(error))
            told.append([str(error), name, said(getattr(asked, name))])
    for error in errors[1:]:  # one that is away is asked again until the join's time is over
        asked = handler(Memory(error))
        told.append([str(error), "next_rendezvous", said(asked.next_rendezvous)])
    backend = Memory()
    first, second = handler(backend), handler(backend)
    told.append([first.is_closed(), second.is_closed()])
    second.set_closed()
    late = handler(backend)
    told.append([second.is_closed(), late.is_closed(), said(late.next_rendezvous)[0]])
    backend = Memory()
    first, second = handler(backend), handler(backend)
    info = first.next_rendezvous()
    first.set_closed()
    told.append([info.rank, first.is_closed(), second.is_closed(), said(second.num_nodes_waiting)])
    first.shutdown()
    print(json.dumps(told))


main()
