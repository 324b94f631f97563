"""What torch has had since 2.14 and 2.15, as its users see it."""

import functools
import json
import socket
from typing import Any

from torch.distributed import DistNetworkError, HashStore
from torch.distributed.elastic.multiprocessing import ProcessFailure
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ErrorHandler, record
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler
from torch.distributed.elastic.utils.distributed import create_c10d_store, get_free_port, get_socket_with_port


class Noting(ErrorHandler):
    """Notes what it is called for; a success may be refused."""

    def __init__(self, refuses: bool = False) -> None:
        self.calls: list[str] = []
        self.refuses = refuses

    def set_entrypoint_fn_name(self, fn_name: str | None) -> None:
        super().set_entrypoint_fn_name(fn_name)
        self.calls.append(f"name {self._fn_name}")

    def initialize(self) -> None:
        self.calls.append("initialize")

    def record_exception(self, e: BaseException) -> None:
        self.calls.append(f"exception {e}")

    def record_success(self) -> None:
        self.calls.append("success")
        if self.refuses:
            raise KeyError("refused")


class Memory(RendezvousBackend):
    """No state."""

    @property
    def name(self) -> str:
        return "memory"

    def get_state(self) -> tuple[bytes, Token] | None:
        return None

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        return None


def leaves(how: Any) -> Any:
    if isinstance(how, BaseException):
        raise how
    return how


def kind(call: Any) -> Any:
    """What it returns, or what kind of exception a program would catch."""
    try:
        return call()
    except (ValueError, SystemExit, KeyError, DistNetworkError, ConnectionRefusedError) as error:
        kinds = {DistNetworkError: "a network error", ValueError: "a bad value"}
        return next((name for each, name in kinds.items() if isinstance(error, each)), type(error).__name__)


def handlers() -> Any:
    ways = [7, ValueError("x"), SystemExit(0), SystemExit(3)]
    told = []
    for function in (leaves, functools.partial(leaves)):
        for way in ways:
            handler = Noting()
            told.append([kind(lambda: record(function, handler)(way)), handler.calls])  # noqa: B023
    handler = Noting(refuses=True)
    told.append([kind(lambda: record(leaves, handler)(7)), handler.calls])
    return told


def ports() -> Any:
    with get_socket_with_port() as held:
        port = held.getsockname()[1]
        listens = kind(lambda: socket.create_connection(("localhost", port), 10))
        taken = False
        with socket.socket() as other:
            try:
                other.bind(("127.0.0.2", port))
            except OSError:
                taken = True
    with socket.create_server(("", get_free_port())):
        return [listens, taken]


def stores() -> Any:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        return kind(lambda: create_c10d_store(True, "localhost", port, retries=0, timeout=5, wait_for_workers=False))


def settings() -> Any:
    def of(**options: Any) -> Any:
        handler = create_handler(HashStore(), Memory(), RendezvousParameters("memory", "", "job", 1, 1, **options))
        return handler.settings.cas_backoff_max_seconds

    given = [{}, *({"cas_backoff_max_seconds": each} for each in ("0.5", 2, -1, "nan", "inf", "x"))]
    return [kind(lambda: of(**each)) for each in given]  # noqa: B023


def report() -> Any:
    error = ChildFailedError("x.py", {0: ProcessFailure(0, 1, -9, "")})
    return [ErrorHandler().maybe_enrich_signal_failure_message("m", "f"), "Signal 9 (SIGKILL) received" in str(error)]


if __name__ == "__main__":
    print(json.dumps([handlers(), ports(), stores(), settings(), report()]))
