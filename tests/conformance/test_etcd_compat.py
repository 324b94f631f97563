"""Code written for torch's etcd modules (contract sections 4.10, 4.11 and 8), with `rallypoint.compat` in their place.

What torch itself does was watched with python-etcd beside it; nobody keeps that package any more, so it is not here.
"""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from rallypoint.base.errors import RallypointError, UserError
from rallypoint.base.poll import until_readable
from rallypoint.compat.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from rallypoint.compat.elastic.rendezvous.etcd_rendezvous import (
    EtcdRendezvous,
    EtcdRendezvousHandler,
    create_rdzv_handler,
)
from rallypoint.compat.elastic.rendezvous.etcd_rendezvous_backend import EtcdRendezvousBackend, create_backend
from rallypoint.compat.elastic.rendezvous.etcd_server import EtcdServer
from rallypoint.compat.elastic.rendezvous.etcd_store import EtcdStore
from rallypoint.compat.elastic.utils.store import barrier, get_all
from rallypoint.store.errors import StoreConnectionError, StoreTimeoutError
from tests.etcd_cluster import binary

pytestmark = pytest.mark.etcd

TIMEOUT = 120.0
T = TypeVar("T")


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", binary())
        made = EtcdServer()
        made.start(stderr=subprocess.DEVNULL)
    yield made
    made.stop()


@pytest.fixture
def store(server: EtcdServer, request: pytest.FixtureRequest) -> Iterator[EtcdStore]:
    with closing(EtcdStore(server.get_client(), f"/{request.node.name}", timedelta(seconds=TIMEOUT))) as made:
        yield made


def side_by_side(*works: Callable[[], T]) -> list[T]:
    """What the works return, which are done in threads of their own."""
    results: dict[int, T] = {}
    threads = [
        threading.Thread(target=lambda place=place, work=work: results.__setitem__(place, work()))
        for place, work in enumerate(works)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert len(results) == len(works)
    return [results[place] for place in range(len(works))]


# The server


def test_a_server_from_start_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", binary())
    data = tmp_path / "data"
    made = EtcdServer(str(data))
    assert (made.get_host(), made.get_port(), made.get_endpoint()) == ("localhost", -1, "localhost:-1")
    with pytest.raises(RallypointError, match="never started"):
        made.get_client()
    made.stop()
    with (tmp_path / "log").open("wb") as log:
        made.start(timeout=30, num_retries=1, stderr=log)
    assert made.get_endpoint() == f"localhost:{made.get_port()}"
    with closing(made.get_client()) as client:
        client.put("/key", "value")
        node = client.get("/key").node
        assert node is not None
        assert node.value == "value"
        with pytest.raises(UserError, match="runs already"):
            made.start()
        made.stop()
        made.stop()
        assert not data.exists()
        made.start(stderr=subprocess.DEVNULL)
    with closing(made.get_client()) as client:
        assert client.get("/key").node is None, "it is another etcd"
    made.stop()
    assert b"serving client" in (tmp_path / "log").read_bytes()


def test_a_server_ends_with_its_process() -> None:
    program = (
        "import subprocess\n"
        "from rallypoint.compat.elastic.rendezvous.etcd_server import EtcdServer\n"
        "server = EtcdServer()\n"
        "server.start(stderr=subprocess.DEVNULL)\n"
        "print(server._etcd.pid, flush=True)\n"
        "input()\n"
    )
    environment = {**os.environ, "TORCHELASTIC_ETCD_BINARY_PATH": binary()}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        supervisor = int(process.stdout.readline())
        gone = os.pidfd_open(supervisor)
        process.send_signal(signal.SIGKILL)
        process.wait(TIMEOUT)
    began = time.monotonic()
    until_readable([gone], TIMEOUT)
    os.close(gone)
    assert time.monotonic() - began < TIMEOUT


def test_a_server_without_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", "/nowhere/etcd")
    with pytest.raises(UserError, match="TORCHELASTIC_ETCD_BINARY_PATH='/nowhere/etcd' is not a program"):
        EtcdServer().start()


# The store


def test_values_as_torch_keeps_them(server: EtcdServer, store: EtcdStore) -> None:
    store.set("a/b", "text")
    store.set("bin", b"\x00\xff")
    assert (store.get("a/b"), store.get("bin")) == (b"text", b"\x00\xff")
    with closing(server.get_client()) as client:
        node = client.get(store.prefix + base64.b64encode(b"a/b").decode()).node
        assert node is not None
        assert node.value == base64.b64encode(b"text").decode()
    # Torch's writes this one into a directory and never finds it again: its base64 has a slash.
    store.set("ab?", "1")
    assert store.get("ab?") == b"1"
    assert sorted(store.list_keys()) == ["a/b", "ab?", "bin"]


def test_counting_by_many(store: EtcdStore) -> None:
    def count() -> list[int]:
        with closing(store.clone()) as own:
            return [own.add("n", 1) for _ in range(10)]

    seen = side_by_side(*[count] * 4)
    assert sorted(number for each in seen for number in each) == list(range(1, 41))
    assert store.add("n", -40) == 0
    store.set("word", "x")
    with pytest.raises(ValueError, match="b'x' of key 'word' is not a number"):
        store.add("word", 1)


def test_waiting(store: EtcdStore) -> None:
    def later() -> None:
        with closing(store.clone()) as own:
            time.sleep(0.2)
            own.set("one", "1")
            own.multi_set(["two", "three"], ["2", "3"])

    thread = threading.Thread(target=later)
    thread.start()
    assert store.multi_get(["three", "one", "two"]) == [b"3", b"1", b"2"]
    store.wait(["one", "two"])
    store.wait([])
    thread.join(TIMEOUT)
    assert store.check(["one", "two"])
    assert store.check([])
    assert not store.check(["one", "missing"])


def test_what_does_not_come_in_time(store: EtcdStore) -> None:
    began = time.monotonic()
    with pytest.raises(LookupError, match="'missing' is not in the store"):
        store.wait(["missing"], timedelta(seconds=0.2))
    with pytest.raises(StoreTimeoutError):
        store.wait(["missing"], override_timeout=timedelta(seconds=0.2))
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(LookupError):
        store.get("missing")
    assert 0.6 <= time.monotonic() - began < TIMEOUT
    assert store.timeout == timedelta(seconds=0.2)


def test_what_torchs_cannot(store: EtcdStore) -> None:
    assert store.compare_set("k", "", "first") == b"first"
    assert store.compare_set("k", "other", "second") == b"first"
    assert store.compare_set("none", "other", "second") == b"other"
    assert store.compare_set("k", "first", "second") == b"second"
    store.append("k", b"!")
    assert store.get("k") == b"second!"
    assert store.num_keys() == 1
    assert store.delete_key("k")
    assert not store.delete_key("k")
    assert not store.has_extended_api()
    with pytest.raises(NotImplementedError, match="no queues"):
        store.queue_push("q", "x")
    with pytest.raises(UserError, match="empty key"):
        store.set("", "x")
    side_by_side(*[lambda: _barrier(store)] * 3)


def _barrier(store: EtcdStore) -> None:
    with closing(store.clone()) as own:
        own.barrier("b", 3)


def test_the_helpers_of_stores(store: EtcdStore) -> None:
    def take_part(rank: int) -> list[bytes]:
        with closing(store.clone()) as own:
            own.set(f"at/{rank}", str(rank))
            found: list[bytes] = get_all(own, rank, "at/", 2)
            barrier(own, 2, "end", 10)
            return found

    assert side_by_side(lambda: take_part(0), lambda: take_part(1)) == [[b"0", b"1"]] * 2


def test_a_store_whose_etcd_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", binary())
    gone = EtcdServer()
    gone.start(stderr=subprocess.DEVNULL)
    with closing(EtcdStore(gone.get_client(), "/store")) as store:
        store.set("k", "v")
        gone.stop()
        for attempt in (lambda: store.get("k"), lambda: store.set("k", "v"), lambda: store.add("n", 1)):
            with pytest.raises(StoreConnectionError, match=r"cannot be used: .*etcd"):
                attempt()


# The rendezvous


def test_a_backend_by_itself(server: EtcdServer) -> None:
    client = server.get_client()
    # What python-etcd's client says of itself is enough.
    other = SimpleNamespace(base_uri=f"http://{server.get_endpoint()}", read_timeout=10, username=None, http=None)
    with (
        closing(EtcdRendezvousBackend(client, "alone")) as one,
        closing(EtcdRendezvousBackend(other, "alone", key_prefix="", ttl=100)) as two,
        closing(client),
    ):
        assert one.name == "etcd-v2"
        assert one.get_state() is None
        written = one.set_state(b"state")
        assert written is not None
        assert two.get_state() == written[:2]
        node = client.get("/alone").node
        assert node is not None
        assert node.value == base64.b64encode(b"state").decode()
    with pytest.raises(ValueError, match="run id must not be empty"):
        EtcdRendezvousBackend(client, "")
    with pytest.raises(UserError, match="does not say where its etcd is"):
        EtcdRendezvousBackend(object(), "job")


def parameters(backend: str, endpoint: str, **config: Any) -> RendezvousParameters:
    return RendezvousParameters(backend, endpoint, "made", 2, 2, "127.0.0.1", **config)


def test_a_backend_and_a_store_from_parameters(server: EtcdServer) -> None:
    backend, store = create_backend(parameters("etcd-v2", server.get_endpoint(), read_timeout="7"))
    with closing(backend), closing(store), closing(server.get_client()) as client:
        assert backend.set_state(b"x") is not None
        assert client.get("/torch/elastic/rendezvous/made").node is not None
        store.set("k", "v")
        assert client.get("/torch/elastic/store/" + base64.b64encode(b"k").decode()).node is not None
    with pytest.raises(RendezvousConnectionError, match="no etcd answers at localhost:1 "):
        create_backend(parameters("etcd-v2", "localhost:1"))
    with pytest.raises(ValueError, match="protocol='ftp' is unknown"):
        create_backend(parameters("etcd-v2", server.get_endpoint(), protocol="ftp"))


def test_two_nodes_meet_by_torchs_names(server: EtcdServer) -> None:
    def meet() -> tuple[object, ...]:
        handler = create_rdzv_handler(parameters("etcd", server.get_endpoint(), timeout=20, last_call_timeout=5))
        assert isinstance(handler, EtcdRendezvousHandler)
        info = handler.next_rendezvous()
        info.store.set(f"hello/{info.rank}", str(info.rank))
        met = info.store.get(f"hello/{1 - info.rank}")
        assert handler.use_agent_store
        told = (info.rank, info.world_size, met, handler.get_backend(), handler.get_run_id())
        assert (handler.is_closed(), handler.num_nodes_waiting()) == (False, 0)
        done.wait(TIMEOUT)
        assert handler.shutdown()
        return told

    done = threading.Barrier(2)
    found = sorted(side_by_side(meet, meet), key=str)
    assert found == [(0, 2, b"1", "etcd", "made"), (1, 2, b"0", "etcd", "made")]


def test_a_handler_put_together_by_hand(server: EtcdServer) -> None:
    client = server.get_client()
    with closing(client):
        made = EtcdRendezvous(client, "/mine", "hand", 1, 1, timeout=20, last_call_timeout=1)
        handler = EtcdRendezvousHandler(made, "127.0.0.1")
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 1)
        assert info.bootstrap_store_info is not None
        assert info.bootstrap_store_info.master_addr == "127.0.0.1"
        assert client.get("/mine/run_hand/rdzv").node is not None
        assert handler.shutdown()
    with pytest.raises(ValueError, match="at least 3 and at most 2"):
        EtcdRendezvous(client, "/mine", "hand", 3, 2, timeout=20, last_call_timeout=1)


def test_the_registry_knows_the_name(server: EtcdServer) -> None:
    params = RendezvousParameters("etcd-v2", server.get_endpoint(), "registry", 1, 1, "127.0.0.1")
    handler = rendezvous_handler_registry.create_handler(params)
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    assert handler.shutdown()
