"""The handler without an agent, over each of our backends."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest

from rallypoint.base.errors import UserError
from rallypoint.control.membership.state import Drain, Fail, NodeInfo, Succeed
from rallypoint.control.protocol.errors import RendezvousClosedError
from rallypoint.control.protocol.messages import Notification, Placed, Placement, ProgressRequest, RoundEnded
from rallypoint.failures.cause import Cause
from rallypoint.rendezvous.elastic import ElasticHandler
from rallypoint.rendezvous.handler import RendezvousInfo, get_rendezvous_handler
from rallypoint.rendezvous.params import RendezvousParameters
from rallypoint.store.client import TCPStore
from rallypoint.store.errors import StoreError
from tests.ports import free_port

CAUSE = Cause(0, 0, "h", 42, 1, "boom", "", 0.0, "")
M = TypeVar("M", bound=Notification)


def handler(backend: str, endpoint: str, nodes: int, /, **options: object) -> ElasticHandler:
    made = get_rendezvous_handler(RendezvousParameters(backend, endpoint, "job", nodes, nodes, None, **options))
    assert isinstance(made, ElasticHandler)
    return made


@contextmanager
def handlers(backend: str, endpoint: str, count: int, **options: object) -> Iterator[list[ElasticHandler]]:
    ranks = [{"rank": rank} if backend == "static" else {} for rank in range(count)]
    made = [handler(backend, endpoint, count, **options, **rank) for rank in ranks]
    try:
        yield made
    finally:
        for handler_ in reversed(made):  # the first one hosts the control plane
            assert handler_.shutdown()


def meet(made: list[ElasticHandler]) -> list[RendezvousInfo]:
    with ThreadPoolExecutor(len(made)) as pool:
        return [found.result(60) for found in [pool.submit(each.next_rendezvous) for each in made]]


@pytest.fixture(params=["c10d", "file", "static"])
def meeting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[ElasticHandler]]:
    """Three handlers of one job, over each backend."""
    backends: dict[str, tuple[str, str, dict[str, object]]] = {
        "c10d": ("c10d", f"127.0.0.1:{free_port()}", {}),
        "file": ("c10d", str(tmp_path / "state"), {"store_type": "file", "is_host": False}),
        "static": ("static", f"127.0.0.1:{free_port()}", {}),
    }
    backend, endpoint, options = backends[request.param]
    with handlers(backend, endpoint, 3, **options) as made:
        yield made


def connected(info: RendezvousInfo) -> TCPStore:
    where = info.bootstrap_store_info
    assert where is not None
    return TCPStore(where.master_addr, where.master_port, timeout=timedelta(seconds=20))


def test_rounds_have_ranks_and_a_store_of_their_own(meeting: list[ElasticHandler]) -> None:
    first = meet(meeting)
    assert sorted(info.rank for info in first) == [0, 1, 2]
    assert {info.world_size for info in first} == {3}
    assert len({info.bootstrap_store_info for info in first}) == 1
    assert all(handler_.use_agent_store for handler_ in meeting)
    first[0].store.set("word", "given")
    assert [info.store.get("word") for info in first] == [b"given"] * 3
    for info in first:
        getattr(info.store, "close", int)()  # torch's stores, if an earlier test has imported torch, have none
    worker = connected(first[0])
    worker.set("of round 0", "x")
    second = meet(meeting)
    assert [info.rank for info in second] == [info.rank for info in first]
    later = connected(second[0])
    assert not later.check(["of round 0"])
    with pytest.raises(StoreError):
        worker.get("of round 0")
    worker.close()
    later.close()
    meeting[1].set_closed()
    with pytest.raises(RendezvousClosedError, match="the job has stopped"):
        meeting[2].next_rendezvous()
    assert meeting[2].is_closed()


def test_a_static_job_has_a_new_store_before_the_next_round_is_complete() -> None:
    """The host may still be stopping its workers when another node's new workers connect to the same port."""
    with handlers("static", f"127.0.0.1:{free_port()}", 2) as made:
        info = meet(made)[0]
        old = connected(info)
        old.set("of round 0", "x")
        told: queue.SimpleQueue[Notification] = queue.SimpleQueue()
        made[0].listen(told.put)
        made[1].send(Drain(0))
        assert isinstance(told.get(timeout=20), RoundEnded)
        made[0].join(NodeInfo("default", 1, "", 0))  # an agent asks for the next round before it stops its workers
        made[1].next_rendezvous()
        check_stores(made[:1], old, connected(info), [next_of(Placed, told).placement])


def check_stores(made: list[ElasticHandler], old: TCPStore, new: TCPStore, places: list[Placement]) -> None:
    """The store of the next round is new. The old one serves workers that are being stopped, until the round begins."""
    assert not new.check(["of round 0"])
    assert old.get("of round 0") == b"x"
    for handler_, place in zip(made, places, strict=True):
        handler_.begin_round(place)
    with pytest.raises(StoreError):
        old.get("of round 0")
    new.set("of round 1", "y")
    new.close()
    old.close()


def next_of(kind: type[M], told: queue.SimpleQueue[Notification]) -> M:
    while not isinstance(notice := told.get(timeout=20), kind):
        pass
    return notice


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_nodes_that_keep_their_places_use_the_announced_store(backend: str) -> None:
    def store_of(place: Placement) -> TCPStore:
        return TCPStore(place.store_address, place.store_port, timeout=timedelta(seconds=20))

    with handlers(backend, f"127.0.0.1:{free_port()}", 2) as made:
        queues = [queue.SimpleQueue[Notification]() for _ in made]
        for handler_, told in zip(made, queues, strict=True):
            handler_.listen(told.put)
            handler_.join(NodeInfo("default", 1, "", 0), keeps_place=True)
        places = [next_of(Placed, told).placement for told in queues]
        first = made[[place.group_rank for place in places].index(0)]
        for handler_, place in zip(made, places, strict=True):
            handler_.begin_round(place)
        old = store_of(places[0])
        old.set("of round 0", "x")
        first.tell_next_store(0)
        first.send(Fail(0, CAUSE, 3, restarts_workers=True))
        assert [next_of(RoundEnded, told).keeps_place for told in queues] == [True, True]
        again = [next_of(Placed, told).placement for told in queues]
        assert [(place.round, place.group_rank, place.restart_workers) for place in again] == [
            (1, place.group_rank, True) for place in places
        ]
        for handler_ in made:
            handler_.keep_place()
        check_stores(made, old, store_of(again[0]), again)


def test_a_join_never_has_an_announced_store() -> None:
    """Others may have used it in a round that this node does not know."""
    with handlers("c10d", f"127.0.0.1:{free_port()}", 1) as (made,):
        told = queue.SimpleQueue[Notification]()
        made.listen(told.put)
        made.join(NodeInfo("default", 1, "", 0), keeps_place=True)
        made.begin_round(next_of(Placed, told).placement)
        made.tell_next_store(0)
        next_port = made._stores.prepare("127.0.0.1")[1]
        made.send(Drain(0))
        assert not next_of(RoundEnded, told).keeps_place
        made.join(NodeInfo("default", 1, "", 0), keeps_place=True)
        assert next_of(Placed, told).placement.store_port != next_port


def test_an_ended_job_cannot_be_joined(tmp_path: Path) -> None:
    file = str(tmp_path / "state")
    with handlers("c10d", file, 1, store_type="file") as made:
        meet(made)
        made[0].send(Succeed(0))
        while not made[0].is_closed():
            made[0].send(ProgressRequest())
            made[0]._inbox.get(timeout=20)
    with (
        handlers("c10d", file, 1, store_type="file") as later,
        pytest.raises(
            RendezvousClosedError,
            match="can no longer join it: it has succeeded; use another --rdzv-id for a new job",
        ),
    ):
        meet(later)


HERE = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("backend", "endpoint", "options", "match"),
    [
        ("c10d", HERE, {"join_timeout": "abc"}, r"join_timeout='abc' is not a whole number"),
        ("c10d", HERE, {"join_timeout": 0}, r"join_timeout=0 is not positive"),
        *[
            ("c10d", HERE, {"cas_backoff_max_seconds": value}, r"cas_backoff_max_seconds=.* is not a number of seconds")
            for value in (-1, "x", "nan", "inf")
        ],
        ("c10d", HERE, {"lease": "soon"}, r"lease='soon' is not a number of seconds"),
        ("c10d", HERE, {"lease": "nan"}, r"lease='nan' is not a number of seconds from 0.1 to 86400"),
        ("c10d", HERE, {"notice_timeout": "-1"}, r"notice_timeout='-1' is not a number of seconds from 0 to 86400"),
        ("c10d", HERE, {"restart_backoff": "x"}, r"restart_backoff='x' is not a number"),
        ("c10d", HERE, {"same_failure_limit": "-2"}, r"same_failure_limit=-2 is negative"),
        ("c10d", HERE, {"same_failure_limit": "two"}, r"same_failure_limit='two' is not a whole number"),
        ("c10d", HERE, {"store_type": "tape"}, r"store_type='tape' is not supported; choose tcp or file"),
        ("c10d", HERE, {"is_host": "maybe"}, r"is_host='maybe' is not a boolean"),
        ("c10d", HERE, {"rank": -1}, r"node rank -1 is negative"),
        ("static", HERE, {}, "needs this node's rank"),
        ("static", HERE, {"rank": 2}, "--node-rank 2 is out of range with --nnodes=2"),
        ("static", "127.0.0.1", {"rank": 0}, "has no port"),
    ],
)
def test_invalid_options_are_named(backend: str, endpoint: str, options: dict[str, object], match: str) -> None:
    with pytest.raises(UserError, match=match):
        handler(backend, endpoint, 2, **options)
