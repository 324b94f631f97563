"""Requests of the small HTTP server, as bytes."""

from __future__ import annotations

from http import HTTPStatus

import pytest

from rallypoint.base.http import Request, RequestError, document, parse, refusal, stream_head


def test_what_is_asked_for() -> None:
    head = b"GET /a%20b?job=x%2Fy&job=z&e HTTP/1.1\r\nHost:  me:1 \r\nAuthorization: Bearer t\r\n\r\n"
    wanted = Request("/a b", {"job": "z", "e": ""}, {"host": "me:1", "authorization": "Bearer t"}, bodiless=False)
    assert parse(head) == wanted
    assert parse(b"HEAD / HTTP/1.0\r\n\r\n").bodiless


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST / HTTP/1.1\r\n\r\n", HTTPStatus.METHOD_NOT_ALLOWED),
        (b"GET http HTTP/3\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET /?" + b"&".join(b"a=%d" % n for n in range(99)) + b" HTTP/1.1\r\n\r\n", HTTPStatus.BAD_REQUEST),
    ],
)
def test_what_is_refused(head: bytes, status: HTTPStatus) -> None:
    with pytest.raises(RequestError) as refused:
        parse(head)
    assert refused.value.status is status


def test_replies_are_not_kept_and_not_guessed_at() -> None:
    for head in (
        document(HTTPStatus.OK, "text/html", b"x"),
        stream_head("text/event-stream"),
        refusal(HTTPStatus(401)),
    ):
        assert b"\r\nCache-Control: no-store\r\n" in head
        assert b"\r\nX-Content-Type-Options: nosniff\r\n" in head
    assert b"\r\nWWW-Authenticate: Bearer" in refusal(HTTPStatus.UNAUTHORIZED)
