"""Rendezvous that third parties assemble: over a backend, over a store, static."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

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
from rallypoint.rendezvous.handler import RendezvousHandler
from rallypoint.rendezvous.params import RendezvousParameters
from rallypoint.workers.logs.specs import DefaultLogsSpecs, Std
from tests.ports import free_port
from tests.unit.rendezvous.test_shared_state_link import Memory, MemoryBackend

T = TypeVar("T")
WORKER = """
import os, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    sys.exit(3)
print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_RESTART_COUNT"])
"""


def side_by_side(calls: list[Callable[[], T]]) -> list[T]:
    """The results of calls on a thread each."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [pending.result(60) for pending in [pool.submit(call) for call in calls]]


@pytest.mark.process
def test_two_agents_over_a_third_party_s_backend(tmp_path: Path) -> None:
    memory, store = Memory(), HashStore()

    def node(name: str) -> Callable[[], RunResult | None]:
        times = RendezvousTimeout(last_call=timedelta(seconds=1))
        handler = DynamicRendezvousHandler.from_backend(
            "job", store, MemoryBackend(memory), 2, 2, "localhost", times, keep_alive_interval=1
        )
        spec = WorkerSpec("default", 1, handler, entrypoint=sys.executable, args=("-u", "-c", WORKER), max_restarts=1)
        return LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path / name), redirects=Std.ALL)).run

    results = side_by_side([node("a"), node("b")])
    assert [result and result.state for result in results] == [WorkerState.SUCCEEDED] * 2
    said = sorted(path.read_text() for path in tmp_path.glob("*/*/attempt_1/0/stdout.log"))
    assert said == ["0 2 1\n", "1 2 1\n"]


def test_options_of_parameters() -> None:
    options = {"join_timeout": "1", "keep_alive_max_attempt": "7", "cas_backoff_max_seconds": "0.5"}
    params = RendezvousParameters("mine", "", "job", 2, 3, "localhost", **options)
    handler = create_handler(HashStore(), MemoryBackend(Memory()), params)
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


def test_timeouts_are_positive_and_rounded_up() -> None:
    times = RendezvousTimeout(join=timedelta(milliseconds=1500), heartbeat=timedelta(seconds=2))
    handler = DynamicRendezvousHandler.from_backend("job", HashStore(), MemoryBackend(Memory()), 1, 1, timeout=times)
    assert handler.settings.timeout.join == timedelta(seconds=2)
    assert handler.settings.timeout.heartbeat == timedelta(seconds=2)
    for seconds in (0, -1):
        with pytest.raises(UserError, match="last_call timeout"):
            RendezvousTimeout(last_call=timedelta(seconds=seconds))


def met(handlers: list[RendezvousHandler]) -> list[tuple[int, int, bytes]]:
    """Rank, size and an entry by rank 0 in the round's store, by rank."""
    infos = sorted(side_by_side([handler.next_rendezvous for handler in handlers]), key=lambda info: info.rank)
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
def test_impossible_stores(options: dict[str, str], error: type[Exception], text: str) -> None:
    params = RendezvousParameters("c10d", f"localhost:{free_port()}", "job", 1, 1, None, **options)
    with pytest.raises(error, match=text):
        create_backend(params)


def test_the_state_has_torchs_key() -> None:
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
