"""Requests and replies of the health server, as bytes."""

from __future__ import annotations

import json
from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.health.http import (
    HealthView,
    HttpRequest,
    read_request,
    refusal_status,
    refused_response,
    respond,
    response,
)

GET = HttpRequest("GET", "/healthz")


def body(sent: bytes) -> dict[str, object]:
    found = json.loads(sent.partition(b"\r\n\r\n")[2])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("head", "request_"),
    [
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n", GET),
        (b"GET /healthz?verbose=1 HTTP/1.0\r\n\r\n", GET),
        (b"HEAD /status HTTP/1.1\r\n\r\n", HttpRequest("HEAD", "/status")),
        (b"get /healthz HTTP/1.1\r\n\r\n", None),
        (b"GET /healthz\r\n\r\n", None),
        (b"GET /healthz HTTP/2.0\r\n\r\n", None),
        (b"GET  /healthz HTTP/1.1\r\n\r\n", None),
        (b"\x16\x03\x01\x02\r\n\r\n", None),
        (b"GET /" + b"a" * 4000 + b" HTTP/1.1\r\n\r\n", None),
    ],
)
def test_requests(head: bytes, request_: HttpRequest | None) -> None:
    assert read_request(head) == request_


@given(st.binary(max_size=300))
def test_no_bytes_make_it_fail(head: bytes) -> None:
    refusal_status(read_request(head))


def test_what_is_refused() -> None:
    assert refusal_status(None) is HTTPStatus.BAD_REQUEST
    assert refusal_status(HttpRequest("GET", "/etc/passwd")) is HTTPStatus.NOT_FOUND
    assert refusal_status(HttpRequest("POST", "/healthz")) is HTTPStatus.METHOD_NOT_ALLOWED
    assert refusal_status(HttpRequest("HEAD", "/status")) is None
    assert b"\r\nAllow: GET, HEAD\r\n" in refused_response(HTTPStatus.METHOD_NOT_ALLOWED)


@pytest.mark.parametrize(("age", "status"), [(0.0, 200), (60.0, 200), (60.1, 503)])
def test_health_by_age(age: float, status: int) -> None:
    sent = respond(GET, HealthView(age, 60, {"state": "HEALTHY"}))
    assert sent.startswith(f"HTTP/1.1 {status} ".encode())
    assert body(sent) == {"healthy": status == 200, "seconds_since_progress": age, "timeout_seconds": 60}


def test_trouble_is_not_well() -> None:
    sent = respond(GET, HealthView(0, 60, {}, "the agent cannot be asked"))
    assert sent.startswith(b"HTTP/1.1 503 ")
    assert body(sent)["trouble"] == "the agent cannot be asked"


def test_status_is_always_answered() -> None:
    sent = respond(HttpRequest("GET", "/status"), HealthView(99, 60, {"state": "HEALTHY", "workers": [{"pid": 4}]}))
    assert sent.startswith(b"HTTP/1.1 200 ")
    assert body(sent) == {
        "state": "HEALTHY",
        "workers": [{"pid": 4}],
        "healthy": False,
        "seconds_since_progress": 99,
        "timeout_seconds": 60,
    }


def test_head_has_the_length_and_no_body() -> None:
    whole, head = response(HTTPStatus.OK, {"a": 1}), response(HTTPStatus.OK, {"a": 1}, bodiless=True)
    assert whole.startswith(head)
    assert whole[len(head) :] == b'{"a": 1}\n'
    assert b"\r\nContent-Length: 9\r\n" in head
