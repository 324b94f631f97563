"""The site, with jobs of dispatchers in this process."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus
from typing import Any

import pytest

from rallypoint.base.http import Access, Answer, Client, Stream
from rallypoint.base.netlink import Peer
from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.coordinator.jobs import ManyJobs, ServedJobs
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import Close, NodeId, NodeInfo, Settings
from rallypoint.control.protocol.handshake import Hello
from rallypoint.control.protocol.messages import JoinRequest
from rallypoint.observe.metrics import Family, build_family
from rallypoint.observe.site import InProcessJobs, Site
from rallypoint.observe.status import status_fields
from rallypoint.observe.watching.session import copy_of_job

NOW = 1.75e9
TIMEOUT = 120.0
TOKEN = "a-token-of-26-characters-x"
ADDRESS = "127.0.0.1"
HERE, ELSEWHERE = Client(ADDRESS, Peer.OWN_USER), Client("10.1.2.3", Peer.REMOTE)
UNKNOWN = Client(ADDRESS, Peer.UNKNOWN)


async def metrics() -> Sequence[Family]:
    return [build_family()]


def site_of(jobs: ServedJobs, access: Access | None = None) -> Site:
    return Site(InProcessJobs(jobs), access or Access(), metrics, lambda: NOW)


def joined(dispatcher: Dispatcher, host: str) -> int:
    node = NodeId(ADDRESS, 1, 0, host)
    session = dispatcher.attach(lambda _: None, SessionRecord(node, ADDRESS, ADDRESS, ADDRESS, dispatcher.settings))
    dispatcher.receive(session, JoinRequest(NodeInfo("default", 2, ADDRESS, 0), 600))
    return session


def request(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join((f"{method} {path} HTTP/1.1", *headers, "", "")).encode()


def whole(answer: Answer) -> tuple[int, bytes, bytes]:
    """Status, head and body of an answer."""
    assert isinstance(answer, bytes)
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), head, body


def ask(site: Site, path: str, *headers: str, client: Client = HERE, method: str = "GET") -> tuple[int, bytes, bytes]:
    return whole(asyncio.run(site.answer(request(path, *headers, method=method), client)))


async def event(chunks: AsyncIterator[bytes]) -> tuple[str, dict[str, Any]]:
    """The next event of a stream."""
    async with asyncio.timeout(TIMEOUT):
        while True:
            lines = (await anext(chunks)).decode().split("\n")
            if lines[0].startswith("event: "):
                return lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: "))


@pytest.fixture(name="job")
def _job() -> Dispatcher:
    return Dispatcher(Settings("train", 2, 4))


@pytest.mark.parametrize(
    ("access", "client", "headers", "status"),
    [
        (Access(), HERE, (), 200),
        (Access(), HERE, ("Host: localhost:29480",), 200),
        (Access(), Client(ADDRESS, Peer.OTHER_USER), (), 403),
        (Access(), Client("10.1.2.3", Peer.OWN_USER), (), 200),
        (Access(), UNKNOWN, (), 200),
        (Access(), UNKNOWN._replace(address="::ffff:127.0.0.1"), (), 200),
        (Access(), UNKNOWN._replace(address="10.1.2.3"), (), 403),
        (Access(), HERE, ("Host: [::1]:29480",), 200),
        (Access(), HERE, ("Host: 127.0.0.1",), 200),
        (Access(), ELSEWHERE, (), 403),
        (Access(), UNKNOWN._replace(address=""), (), 403),
        (Access(), HERE, ("Host: rebound.example",), 403),
        (Access(), HERE, ("Host: 127.0.0.1.rebound.example:80",), 403),
        (Access(is_open=True), ELSEWHERE, ("Host: node1",), 200),
        (Access(TOKEN), HERE, (), 401),
        (Access(TOKEN), ELSEWHERE, (f"Authorization: Bearer {TOKEN}", "Host: node1"), 200),
        (Access(TOKEN, is_open=True), ELSEWHERE, (), 401),
        (Access(TOKEN), HERE, (f"Authorization: Bearer {TOKEN}x",), 401),
        (Access(TOKEN), HERE, (f"Authorization: Basic {TOKEN}",), 401),
        (Access(TOKEN), HERE, ("Authorization: Bearer \xff",), 401),
    ],
)
def test_access(job: Dispatcher, access: Access, client: Client, headers: tuple[str, ...], status: int) -> None:
    site = site_of(job, access)
    for path in ("/status.json", "/metrics"):
        found, _, body = ask(site, path, *headers, client=client)
        assert found == status, body
        assert status == 200 or b"train" not in body
    found, _, _ = ask(site, "/events", *headers, client=client, method="HEAD") if status != 200 else (status, b"", b"")
    assert found == status


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/"])
def test_probes_and_the_empty_page_are_public(job: Dispatcher, path: str) -> None:
    status, head, body = ask(site_of(job, Access(TOKEN)), path, client=ELSEWHERE)
    assert status == HTTPStatus.OK
    assert b"train" not in body.replace(b"effective_training_time_ratio", b"")
    assert path != "/" or b"Content-Security-Policy: default-src 'none'" in head
    assert ask(site_of(job), path, method="HEAD")[2] == b""


def test_the_page_loads_nothing(job: Dispatcher) -> None:
    page = ask(site_of(job), "/")[2].decode()
    assert "src=" not in page
    assert "@import" not in page
    assert "innerHTML" not in page  # texts of jobs are never markup
    addresses = {word for word in page.replace('"', " ").split() if "://" in word}
    assert addresses == {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/etc/passwd", "GET", 404),
        ("/status.json/", "GET", 404),
        ("/../status.json", "GET", 404),
        ("/status.json?job=other", "GET", 404),
        ("/events?job=other", "GET", 404),
        ("/status.json", "POST", 405),
        ("/metrics", "DELETE", 405),
    ],
)
def test_unknown_paths(job: Dispatcher, path: str, method: str, status: int) -> None:
    found, _, body = ask(site_of(job), path, method=method)
    assert found == status
    assert json.loads(body)["error"]


def test_metrics_without_prometheus_client(job: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    status, _, body = ask(site_of(job), "/metrics")
    assert status == HTTPStatus.SERVICE_UNAVAILABLE
    assert "pip install prometheus-client" in json.loads(body)["error"]


def test_status_json(job: Dispatcher) -> None:
    joined(job, "a")
    shown = json.loads(ask(site_of(job), "/status.json?job=train")[2])
    wanted = status_fields(copy_of_job(job)(), NOW)
    assert shown["phase"] == "waiting"
    assert [node["host"] for node in shown["nodes"]] == ["a"]
    assert shown.keys() == wanted.keys()
    passing = {"since": 0, "phase_seconds": 0, "age_seconds": 0, "nodes": 0}
    assert {**shown, **passing} == {**wanted, **passing}


def test_events_of_a_job(job: Dispatcher) -> None:
    async def run() -> None:
        stream = await site_of(job).answer(request("/events"), HERE)
        assert isinstance(stream, Stream)
        assert b"\r\nContent-Type: text/event-stream\r\n" in stream.head
        kind, first = await event(stream.chunks)
        assert (kind, first["phase"], first["nodes"]) == ("status", "waiting", [])
        session = joined(job, "a")
        changed = await ticked(stream.chunks)
        assert [node["host"] for node in changed["nodes"]] == ["a"]
        job.receive(session, Close())
        assert (await ticked(stream.chunks))["phase"] == "stopped"
        with pytest.raises(StopAsyncIteration):
            await event(stream.chunks)
        assert job.members == 1  # the watcher left, and was never a node

    async def ticked(chunks: AsyncIterator[bytes]) -> dict[str, Any]:
        waiting = asyncio.ensure_future(event(chunks))
        while not waiting.done():
            job.tick()  # like the control server
            await asyncio.sleep(0.02)
        return waiting.result()[1]

    asyncio.run(run())


def test_several_jobs() -> None:
    jobs = ManyJobs()
    site = site_of(jobs)
    assert json.loads(ask(site, "/status.json")[2])["jobs"] == []
    for name in ("one", "two"):
        hello = Hello(1, name, b"", ADDRESS, NodeId(ADDRESS, 1, 0), False, Settings(name, 1, 2))
        joined(jobs.dispatcher_for(hello, ADDRESS), "a")
    listed = json.loads(ask(site, "/status.json")[2])
    assert sorted(listed_job["job"] for listed_job in listed["jobs"]) == ["one", "two"]
    assert json.loads(ask(site, "/status.json?job=two")[2])["job"] == "two"

    async def run() -> None:
        stream = await site.answer(request("/events"), HERE)
        assert isinstance(stream, Stream)
        kind, shown = await event(stream.chunks)
        assert (kind, len(shown["jobs"])) == ("jobs", 2)
        await stream.chunks.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())
