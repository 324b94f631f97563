"""Rendezvous that third parties assemble themselves: over a backend, over a store, static."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from rallypoint.agent.spec import RunResult, WorkerSpec, WorkerState
from rallypoint.base.errors import UserError
from rallypoint.compat import FileStore, HashStore, TCPStore
from rallypoint.compat.agent import LocalElasticAgent
from rallypoint.compat.handlers import (
    C10dRendezvousBackend,
    DynamicRendezvousHandler,
    RendezvousTimeout,
    StaticTCPRendezvous,
    create_backend,
    create_handler,
)
from rallypoint.control.protocol.errors import RendezvousConnectionError, RendezvousTimeoutError
from rallypoint.rendezvous.backends.static import create_handler as create_rdzv_handler
from rallypoint.rendezvous.handler import RendezvousHandler, RendezvousInfo
from rallypoint.rendezvous.params import RendezvousParameters
from rallypoint.rendezvous.shared_state import RendezvousBackend, Token
from rallypoint.workers.logs.specs import DefaultLogsSpecs, Std
from tests.ports import free_port

WORKER = """
import os, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    sys.exit(3)
print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_RESTART_COUNT"])
"""


class Place:
    """What the nodes of one job share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.state: tuple[bytes, int] | None = None


class Memory(RendezvousBackend):
    """A backend as a third party writes it."""

    def __init__(self, place: Place) -> None:
        self._place = place

    @property
    def name(self) -> str:
        return "memory"

    def get_state(self) -> tuple[bytes, Token] | None:
        with self._place.lock:
            return self._place.state

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        with self._place.lock:
            had = self._place.state
            if token != (None if had is None else had[1]):
                return None if had is None else (*had, False)
            self._place.state = (state, 1 if had is None else had[1] + 1)
            return (*self._place.state, True)


def side_by_side(*calls: Callable[[], object]) -> list[object]:
    """What each of them returns, or the exception that it raises."""
    results: dict[int, object] = {}

    def run(number: int, call: Callable[[], object]) -> None:
        try:
            results[number] = call()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[number] for number in range(len(calls))]


@pytest.mark.process
def test_a_job_of_two_agents_over_a_backend_of_a_third_party(tmp_path: Path) -> None:
    place, store = Place(), HashStore()

    def node(name: str) -> Callable[[], RunResult | None]:
        times = RendezvousTimeout(last_call=timedelta(seconds=1))
        handler = DynamicRendezvousHandler.from_backend(
            "job", store, Memory(place), 2, 2, "localhost", times, keep_alive_interval=1
        )
        spec = WorkerSpec("default", 1, handler, entrypoint=sys.executable, args=("-u", "-c", WORKER), max_restarts=1)
        return LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path / name), redirects=Std.ALL)).run

    results = side_by_side(node("a"), node("b"))
    assert [result.state for result in results if isinstance(result, RunResult)] == [WorkerState.SUCCEEDED] * 2
    said = sorted(path.read_text() for path in tmp_path.glob("*/*/attempt_1/0/stdout.log"))
    assert said == ["0 2 1\n", "1 2 1\n"]


def test_options_of_the_parameters_hold() -> None:
    params = RendezvousParameters(
        "mine",
        "",
        "job",
        2,
        3,
        "localhost",
        join_timeout="1",
        keep_alive_max_attempt="7",
        cas_backoff_max_seconds="0.5",
    )
    handler = create_handler(HashStore(), Memory(Place()), params)
    try:
        settings = handler.settings
        assert (settings.run_id, settings.min_nodes, settings.max_nodes) == ("job", 2, 3)
        assert settings.timeout.join == timedelta(seconds=1)
        assert settings.timeout.close == timedelta(seconds=30)
        assert settings.keep_alive_max_attempt == 7
        assert settings.cas_backoff_max_seconds == 0.5
        assert handler.get_backend() == "mine"
        with pytest.raises(RendezvousTimeoutError):
            handler.next_rendezvous()
    finally:
        assert handler.shutdown()


def test_parts_of_a_second_are_rounded_up() -> None:
    times = RendezvousTimeout(join=timedelta(milliseconds=1500), heartbeat=timedelta(seconds=2))
    handler = DynamicRendezvousHandler.from_backend("job", HashStore(), Memory(Place()), 1, 1, timeout=times)
    assert handler.settings.timeout.join == timedelta(seconds=2)
    assert handler.settings.timeout.heartbeat == timedelta(seconds=2)


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_time_that_is_not_positive_is_named(seconds: int) -> None:
    with pytest.raises(UserError, match="last_call timeout"):
        RendezvousTimeout(last_call=timedelta(seconds=seconds))


def met(handlers: list[RendezvousHandler]) -> list[tuple[int, int, bytes]]:
    """Rank, size and what rank 0 has left in the round's store, by rank."""
    infos = [
        each for each in side_by_side(*[each.next_rendezvous for each in handlers]) if isinstance(each, RendezvousInfo)
    ]
    infos.sort(key=lambda info: info.rank)
    infos[0].store.set("left", b"here")
    return [(info.rank, info.world_size, info.store.get("left")) for info in infos]


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_c10d_over_a_store(kind: str, tmp_path: Path) -> None:
    endpoint = f"localhost:{free_port()}" if kind == "tcp" else str(tmp_path / "state")
    params = RendezvousParameters("c10d", endpoint, "job", 2, 2, "localhost", store_type=kind, read_timeout="30")
    made = [create_backend(params), create_backend(params)]
    assert [type(store) for _, store in made] == [TCPStore if kind == "tcp" else FileStore] * 2
    handlers: list[RendezvousHandler] = [create_handler(store, backend, params) for backend, store in made]
    try:
        assert met(handlers) == [(0, 2, b"here"), (1, 2, b"here")]
    finally:
        for handler in handlers:
            handler.shutdown()
        for _, store in reversed(made):
            store.close()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"store_type": "zoo"}, UserError, "store_type='zoo'"),
        ({"read_timeout": "0"}, UserError, "read_timeout=0"),
        ({"is_host": "perhaps"}, UserError, "is_host='perhaps'"),
        ({"is_host": "false", "read_timeout": "1"}, RendezvousConnectionError, "cannot be reached"),
    ],
)
def test_a_store_that_cannot_be(options: dict[str, str], error: type[Exception], text: str) -> None:
    params = RendezvousParameters("c10d", f"localhost:{free_port()}", "job", 1, 1, None, **options)
    with pytest.raises(error, match=text):
        create_backend(params)


def test_the_state_stands_where_torchs_stands() -> None:
    store = HashStore()
    backend = C10dRendezvousBackend(store, "job")
    assert backend.get_state() is None
    assert store.get("torch.rendezvous.job") == b"Y2FuaW1hZGFt"
    first = backend.set_state(b"one")
    assert first is not None
    assert (first[0], first[2]) == (b"one", True)
    assert backend.set_state(b"two", "stale") == (b"one", first[1], False)


@pytest.mark.parametrize("by_params", [True, False])
def test_static(by_params: bool) -> None:
    port = free_port()

    def handler(rank: int) -> RendezvousHandler:
        if not by_params:
            return StaticTCPRendezvous("localhost", port, rank, 2, "job", timeout=30)
        return create_rdzv_handler(
            RendezvousParameters("static", f"localhost:{port}", "job", 2, 2, rank=rank, timeout=30)
        )

    handlers = [handler(1), handler(0)]
    try:
        assert met(handlers) == [(0, 2, b"here"), (1, 2, b"here")]
        assert {each.get_backend() for each in handlers} == {"static"}
    finally:
        for each in handlers:
            each.shutdown()
