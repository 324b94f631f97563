"""Requests and replies of the health server as bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus

import pytest

from rallypoint.base.http import RequestError, parse, refusal, response
from rallypoint.observe.health import HealthView, reply_to

GET = b"GET /healthz HTTP/1.1\r\n\r\n"
WELL = HealthView(0, 60, {})


def reply(head: bytes, view: Callable[[], HealthView]) -> bytes:
    """The reply to a request; `head` ends with the blank line."""
    try:
        request = parse(head)
    except RequestError as error:
        return refusal(error.status)
    return reply_to(request, view) or refusal(HTTPStatus.NOT_FOUND)


def body(sent: bytes) -> dict[str, object]:
    found = json.loads(sent.partition(b"\r\n\r\n")[2])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n", 200),
        (b"GET /healthz?verbose=1 HTTP/1.0\r\n\r\n", 200),
        (b"HEAD /status HTTP/1.1\r\n\r\n", 200),
        (b"GET /etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"POST /healthz HTTP/1.1\r\n\r\n", 405),
        (b"get /healthz HTTP/1.1\r\n\r\n", 400),
        (b"GET /healthz\r\n\r\n", 400),
        (b"GET /healthz HTTP/2.0\r\n\r\n", 400),
        (b"GET  /healthz HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\r\n\r\n", 400),
        (b"GET /" + b"a" * 4000 + b" HTTP/1.1\r\n\r\n", 400),
    ],
)
def test_requests(head: bytes, status: int) -> None:
    sent = reply(head, lambda: WELL)
    assert sent.startswith(f"HTTP/1.1 {status} ".encode())
    assert (b"\r\nAllow: GET, HEAD\r\n" in sent) == (status == 405)
    if status != 200:
        assert sent == refusal(HTTPStatus(status))


@pytest.mark.parametrize(("age", "status"), [(0.0, 200), (60.0, 200), (60.1, 503)])
def test_health_by_age(age: float, status: int) -> None:
    sent = reply(GET, lambda: HealthView(age, 60, {"state": "HEALTHY"}))
    assert sent.startswith(f"HTTP/1.1 {status} ".encode())
    assert body(sent) == {"healthy": status == 200, "seconds_since_progress": age, "timeout_seconds": 60}
    sent = reply(GET, lambda: HealthView(age, 60, {}, "the agent cannot be queried"))
    assert sent.startswith(b"HTTP/1.1 503 ")
    assert body(sent)["trouble"] == "the agent cannot be queried"


def test_status_of_an_unhealthy_agent() -> None:
    view = HealthView(99, 60, {"state": "HEALTHY", "workers": [{"pid": 4}]})
    sent = reply(b"GET /status HTTP/1.1\r\n\r\n", lambda: view)
    assert sent.startswith(b"HTTP/1.1 200 ")
    assert body(sent) == {
        "state": "HEALTHY",
        "workers": [{"pid": 4}],
        "healthy": False,
        "seconds_since_progress": 99,
        "timeout_seconds": 60,
    }


def test_head() -> None:
    whole, head = response(HTTPStatus.OK, {"a": 1}), response(HTTPStatus.OK, {"a": 1}, bodiless=True)
    assert whole.startswith(head)
    assert whole[len(head) :] == b'{"a": 1}\n'
    assert b"\r\nContent-Length: 9\r\n" in head
