"""How many files a process may have open."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.base.descriptors import RESERVED, allow_descriptors, allow_nodes, for_connections
from rallypoint.control.membership.state import NodeInfo
from rallypoint.rendezvous.elastic import ElasticHandler
from rallypoint.rendezvous.handler import get_rendezvous_handler
from rallypoint.rendezvous.params import RendezvousParameters
from rallypoint.rendezvous.worker_stores import AgentStoreSupply
from rallypoint.workers.reaper.client import ReaperClient
from tests.ports import free_port


@pytest.fixture(autouse=True, name="hard")
def _hard(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Set a low soft limit; return the hard one."""
    monkeypatch.setattr("rallypoint.base.descriptors._reported", {})
    monkeypatch.setattr("rallypoint.base.descriptors._before", None)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(600, before[1]), before[1]))
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_if_needed(hard: int) -> None:
    assert allow_descriptors(2) == min(600, hard), "enough for two"
    assert allow_descriptors(1000) == hard
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


def test_a_low_hard_limit_is_reported_once(hard: int, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        allow_descriptors(hard, "A crowd")
    allow_descriptors(hard)
    assert caplog.messages == [
        f"A crowd need {hard + RESERVED} open files in this process, but its limit is {hard}, so some of them cannot "
        "connect; raise the hard limit (`ulimit -Hn`, or LimitNOFILE= for a service)"
    ]


def test_higher_needs_are_reported_too(hard: int, caplog: pytest.LogCaptureFixture) -> None:
    """A job's nodes are known first, its workers when the round begins: the log says how far to raise the limit."""
    allow_nodes(hard)
    stores = AgentStoreSupply("127.0.0.1")
    for clients in (9 * hard, hard, 9 * hard):
        stores.prepare("127.0.0.1")
        stores.begin_round(is_host=True, clients=clients)
    stores.close()
    assert [message.partition(" open files")[0] for message in caplog.messages] == [
        f"Up to {hard} nodes of this job need {hard + RESERVED}",
        f"The {9 * hard} connections of this job's workers and agents need {9 * hard + RESERVED}",
    ]


def test_reserved_descriptors() -> None:
    assert for_connections(1 << 20) == (1 << 20) - RESERVED
    assert for_connections(40) == 30


def test_the_host_of_a_round_gets_descriptors_for_workers(hard: int) -> None:
    stores = AgentStoreSupply("127.0.0.1")
    stores.prepare("127.0.0.1")
    stores.begin_round(is_host=False, clients=1200)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(600, hard), "they connect elsewhere"
    stores.prepare("127.0.0.1")
    stores.begin_round(is_host=True, clients=1200)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    stores.close()


@pytest.mark.process
def test_workers_of_a_host_keep_the_former_limit(hard: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    params = RendezvousParameters("c10d", f"127.0.0.1:{free_port()}", "job", 1, 2, last_call_timeout=1)
    handler = get_rendezvous_handler(params)
    assert isinstance(handler, ElasticHandler)
    handler.listen(lambda _notification: None)
    handler.join(NodeInfo("default", 1, "", 0))
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    reaper = ReaperClient()  # started after the limit was raised, like a replacement
    try:
        given = Path(f"/proc/{reaper.pid}/limits").read_text()
        assert f"Max open files            {before[0]} " in given
    finally:
        reaper.close()
        handler.shutdown()


def test_a_huge_hard_limit_is_not_used_completely() -> None:
    limits: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:  # undone before the limit is restored
        patch.setattr(resource, "getrlimit", lambda _what: limits[-1] if limits else (1024, 1 << 30))
        patch.setattr(resource, "setrlimit", lambda _what, limit: limits.append(limit))
        allow_nodes(2)
        assert limits == [(1 << 20, 1 << 30)]
        assert allow_descriptors(1 << 21) == 1 << 30
