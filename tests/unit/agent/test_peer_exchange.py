"""The exchange between agents before the workers of a round start: over a real store, with invalid records."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pytest

from rallypoint.agent.loop import run_agent
from rallypoint.agent.spec import WorkerGroup, WorkerState
from rallypoint.agent.third_party import exchange
from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.errors import SignalException
from rallypoint.control.membership.state import NodeRanks
from rallypoint.control.protocol.messages import Placement
from rallypoint.failures.cause import Ending
from rallypoint.features.round_setup import (
    PeerExchange,
    PeerRecord,
    PeerUser,
    RoundInSetup,
    RoundSetup,
    decode_record,
    encode_record,
)
from rallypoint.rendezvous.handler import RendezvousHandler, get_rendezvous_handler
from rallypoint.rendezvous.params import RendezvousParameters
from rallypoint.store.client import TCPStore
from rallypoint.store.plain import HashStore
from rallypoint.store.server import StoreServer
from tests.ports import free_port
from tests.unit.agent.features import finish
from tests.unit.agent.test_stopping import TIMEOUT, beside
from tests.unit.agent.third_party import CountingHandler, outcome
from tests.unit.agent.thread_workers import ThreadWorkers
from tests.unit.clocks import ShiftedClock
from tests.unit.compat.test_subclass import ours, spec
from tests.waiting import until

RECORD = PeerRecord(1, "n1", "10.0.0.1", 2, 2, {"jax": (4000,), "tf": (4001, 4002)})


class User(PeerUser):
    """Reserves a made-up port, and wants the records of these ranks."""

    use = "made-up"

    def __init__(self, *wanted: int, error: OSError | None = None) -> None:
        self._wanted = wanted
        self._error = error
        self.taken: Mapping[int, PeerRecord] = {}
        self.asked = threading.Event()

    def reserve(self, round_: RoundInSetup) -> Sequence[int]:
        self.asked.set()
        if self._error is not None:
            raise self._error
        return [5000 + round_.place.group_rank]

    def wanted(self, round_: RoundInSetup) -> Collection[int]:
        return [rank for rank in self._wanted if rank < round_.place.group_world_size]

    def take(self, round_: RoundInSetup) -> None:
        self.taken = round_.records

    def close(self) -> None:
        return


def entered(rank: int, nodes: int, port: int, handler: Callable[[], RendezvousHandler] = ours) -> WorkerGroup:
    """A group of two workers that has entered round 3, with its store on this port."""
    group = WorkerGroup(spec(handler(), workers=2))
    ranks = NodeRanks(2 * rank, 2 * nodes, 2 * rank, 2 * nodes)
    group.placement = Placement(3, rank, nodes, ranks, "127.0.0.1", port, 1)
    return group


def exchanging(*users: User, clock: Clock = SYSTEM_CLOCK, timeout: float = TIMEOUT) -> RoundSetup:
    return RoundSetup([PeerExchange(users, timeout=timeout)], clock)


NO_PORT = OSError(98, "Address already in use")


@contextmanager
def waiting(user: User, clock: Clock = SYSTEM_CLOCK) -> Iterator[tuple[RoundSetup, threading.Thread, int]]:
    """Group rank 1, which waits for the record of the other node: its exchange, its thread and the store's port."""
    peers = exchanging(user, clock=clock)
    with StoreServer("127.0.0.1") as server, TCPStore("127.0.0.1", server.port) as store:
        peers.begin(entered(1, 2, server.port))
        store.wait(["rallypoint/peers/3/1"], TIMEOUT)
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "rallypoint-setup"]
        yield peers, thread, server.port
        peers.close()
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def test_nodes_get_the_records_that_they_want() -> None:
    users = [User(0), User(0, 2), User()]
    exchanges = [exchanging(user) for user in users]
    with StoreServer("127.0.0.1") as server:
        groups = [entered(rank, 3, server.port) for rank in range(3)]
        groups[0].spec.local_addr = "node1.example"
        for peers, group in zip(exchanges, groups, strict=True):
            peers.begin(group)
        for peers in exchanges:
            finish(peers)
            assert not peers.failure
    assert [sorted(user.taken) for user in users] == [[0], [0, 1, 2], [2]]
    found = users[1].taken[2]
    assert found[:1] + found[2:] == (2, "127.0.0.1", 4, 2, {"made-up": (5002,)})
    assert users[1].taken[0].address == "node1.example", "as given"
    for peers in exchanges:
        peers.close()


def test_one_node_and_one_without_a_port_need_no_store() -> None:
    user = User(0)
    with closing(exchanging(user)) as peers:
        peers.begin(entered(0, 1, 1))
        assert not peers.preparing()
    assert user.taken[0].ports == {"made-up": (5000,)}
    with closing(exchanging(User(error=NO_PORT))) as peers:
        peers.begin(entered(0, 2, 1))
        assert not peers.preparing()


def test_a_store_that_cannot_be_reached_is_named_with_the_reason() -> None:
    port = free_port()
    with closing(exchanging(User(0), timeout=0.3)) as peers:
        peers.begin(entered(1, 2, port))
        finish(peers)
        assert f"the other nodes of round 3 from the worker store at 127.0.0.1:{port}" in peers.failure
        assert "Connection refused" in peers.failure
        assert peers.failure.startswith(os.uname().nodename)


def test_silent_nodes_are_named() -> None:
    with StoreServer("127.0.0.1") as server, closing(exchanging(User(*range(12)), timeout=0.3)) as peers:
        peers.begin(entered(1, 12, server.port))
        finish(peers)
        assert "nothing arrived from group rank 0, 2, 3, 4, 5, 6, 7, 8 and 3 more in time" in peers.failure


def test_a_long_wait_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = ShiftedClock()
    with waiting(User(0), clock) as (peers, _, port):
        peers.step()
        assert not caplog.messages
        clock.ahead = 11.0
        assert peers.wake_at() <= clock.monotonic()
        peers.step()
        peers.step()
        (line,) = caplog.messages
        waits = f"from the worker store at 127.0.0.1:{port}: nothing has arrived for 10 s (limit: {TIMEOUT:g} s)"
        assert waits in line
        assert peers.preparing()


def test_an_invalid_record_is_a_failure() -> None:
    with (
        StoreServer("127.0.0.1") as server,
        TCPStore("127.0.0.1", server.port) as store,
        closing(exchanging(User(0))) as peers,
    ):
        store.set("rallypoint/peers/3/0", "\x1b[31m")
        peers.begin(entered(1, 2, server.port))
        finish(peers)
        assert "the record of group rank 0 cannot be used" in peers.failure
        assert peers.failure.isprintable()


def test_a_round_that_ends_early_leaves_no_connection() -> None:
    user = User(0)
    with waiting(user) as (peers, thread, _):
        peers.cancel()
        thread.join(TIMEOUT)
        assert not thread.is_alive()
        peers.step()
        assert not peers.failure
        assert not user.taken


class Exchanging(ThreadWorkers):
    def __init__(self, handler: RendezvousHandler, user: User) -> None:
        super().__init__(lambda rank, start, stopping: rank, handler)
        self.setup = exchanging(user)
        self.add_preparation(self.setup)


def test_a_failed_exchange_fails_the_job() -> None:
    handler = CountingHandler(HashStore(timeout=TIMEOUT), "job", 1, address="127.0.0.1")
    workers = Exchanging(handler, User(error=NO_PORT))
    result = outcome(workers)
    assert result.state is WorkerState.FAILED
    assert result.ending is Ending.INFRASTRUCTURE
    assert result.cause is not None
    assert result.cause.headline.endswith("found no port for its workers: Address already in use")
    assert result.restarts.used == 1, "another round may do better"
    assert "start" not in workers.calls


def test_a_signal_ends_the_wait_for_other_nodes() -> None:
    store = HashStore(timeout=TIMEOUT)
    handlers = [CountingHandler(store, "job", 2, address="127.0.0.1") for _ in range(2)]
    user = User(0, 1)
    workers = Exchanging(handlers[0], user)

    def other_node() -> None:
        info = handlers[1].next_rendezvous()
        exchange(info.store, info.rank, 2, "default", 1, 0)  # and sends no record
        assert user.asked.wait(TIMEOUT)
        os.kill(os.getpid(), signal.SIGTERM)

    with beside(threading.Thread(target=other_node)), pytest.raises(SignalException):
        run_agent(workers)
    assert "start" not in workers.calls


def test_workers_do_not_start_in_a_round_that_a_node_left() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    handlers = [
        get_rendezvous_handler(RendezvousParameters("c10d", endpoint, "job", 2, 2, is_host=is_host))
        for is_host in ("true", "false")
    ]
    user = User(0, 1)
    workers = Exchanging(handlers[0], user)

    def other_node() -> None:
        handlers[1].next_rendezvous()  # and sends no record
        try:
            assert user.asked.wait(TIMEOUT)
            until(workers.preparations.preparing)  # a moment after it was asked
            handlers[1].shutdown()
            until(lambda: not workers.preparations.preparing())
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with beside(threading.Thread(target=other_node)), pytest.raises(SignalException):
        run_agent(workers)
    assert "start" not in workers.calls
    assert not workers.setup.failure


def test_records_are_read_as_written() -> None:
    assert decode_record(encode_record(RECORD), 1, 4) == RECORD
    bare = RECORD._replace(ports={}, address="2001:db8::1")
    assert decode_record(encode_record(bare), 1, 4) == bare


USES = [f"u{number}" for number in range(17)]
INVALID: dict[int, list[Any]] = {
    0: [2, True, None],
    1: ["", "a\nb", "n" * 256, 7],
    2: ["", "a b", "10.0.0.1:80", "-\x00", ["10.0.0.1"]],
    3: [-1, 4, 2.0],
    4: [0, 3],
    5: [[], {"Jax": [1]}, {"jax": 1}, {"jax": [0]}, {"jax": [65536]}, {"jax": ["1"]}, {use: [1] for use in USES}],
}


@pytest.mark.parametrize(("place", "value"), [(place, value) for place, values in INVALID.items() for value in values])
def test_invalid_fields_are_refused(place: int, value: Any) -> None:
    fields: list[Any] = json.loads(encode_record(RECORD))
    fields[place] = value
    with pytest.raises(ValueError, match="the record of group rank 1 cannot be used"):
        decode_record(json.dumps(fields).encode(), 1, 4)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"[1]", b"\xff", b"[" * 5000, b"9" * 5000, b" " * 70000])
def test_other_data_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="the record of group rank 1 cannot be used") as refused:
        decode_record(data, 1, 4)
    assert str(refused.value).isprintable()
