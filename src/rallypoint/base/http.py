"""Requests and replies of the small HTTP server (`base.http_server`): bytes in, bytes out. Pure.

Only the HTTP that probes, scrapers and pages need: one GET or HEAD without a body; then the connection closes. A stream
is a reply that does not end.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote

from rallypoint.base.endpoint import is_loopback, unmapped_address
from rallypoint.base.netlink import Peer

MAX_REQUEST = 8192
"""Maximum size of a request's head in bytes; larger ones are refused."""

_LINE = re.compile(rb"([A-Z]{1,16}) (\S{1,2048}) HTTP/1\.[01]")
_METHODS = (b"GET", b"HEAD")
_MAX_FIELDS = 8


class Request(NamedTuple):
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """Headers by lower-case name. Of repeated headers, only the last one."""
    bodiless: bool
    """Whether the client wants only the head of the reply (HEAD)."""


class RequestError(ValueError):
    """The server must refuse a request with this reply."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


class Stream(NamedTuple):
    """A reply that continues until its reader disconnects or `chunks` ends."""

    head: bytes
    chunks: AsyncIterator[bytes]


Answer = bytes | Stream


class Client(NamedTuple):
    address: str
    user: Peer


Handler = Callable[[bytes, Client], Awaitable[Answer]]
"""Answers a request. Arguments: its head up to the blank line, and the client."""


def parse(head: bytes) -> Request:
    """Parse a request. Raises RequestError if it is malformed or neither GET nor HEAD."""
    line, _, rest = head.partition(b"\r\n")
    match = _LINE.fullmatch(line)
    if match is None:
        raise RequestError(HTTPStatus.BAD_REQUEST)
    method, target = match.groups()
    if method not in _METHODS:
        raise RequestError(HTTPStatus.METHOD_NOT_ALLOWED)
    path, _, query = target.decode("latin-1").partition("?")
    try:
        fields = parse_qs(query, keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError:
        raise RequestError(HTTPStatus.BAD_REQUEST) from None
    headers = (line.partition(b":") for line in rest.split(b"\r\n") if line)
    return Request(
        unquote(path),
        {name: values[-1] for name, values in fields.items()},
        {name.decode("latin-1").lower(): value.decode("latin-1").strip() for name, _, value in headers},
        method == b"HEAD",
    )


def refusal(status: HTTPStatus, sentence: str = "") -> bytes:
    return response(status, {"error": sentence or status.phrase})


def response(status: HTTPStatus, fields: Mapping[str, Any], bodiless: bool = False) -> bytes:
    """A whole reply with `fields` as JSON; `bodiless` omits the body but still states its length."""
    return document(status, "application/json", json.dumps(fields, default=str).encode() + b"\n", bodiless)


def document(
    status: HTTPStatus, kind: str, body: bytes, bodiless: bool = False, headers: Mapping[str, str] | None = None
) -> bytes:
    more = {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}
    return _head(status, more) + (b"" if bodiless else body)


def stream_head(kind: str) -> bytes:
    return _head(HTTPStatus.OK, {"Content-Type": kind, "X-Accel-Buffering": "no"})


_MORE_HEADERS = {
    HTTPStatus.METHOD_NOT_ALLOWED: {"Allow": "GET, HEAD"},
    HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": 'Bearer realm="rallypoint"'},
}


def _head(status: HTTPStatus, headers: Mapping[str, str]) -> bytes:
    fields = {**headers, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Connection": "close"}
    fields |= _MORE_HEADERS.get(status, {})
    lines = (f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in fields.items()))
    return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n"


class Access(NamedTuple):
    """The clients that may see jobs: those with the `token`; without a token, this user and root on this machine, or
    everybody (`is_open`).
    """

    token: str = ""
    is_open: bool = False

    def refusal_for(self, request: Request, client: Client) -> bytes | None:
        """The reply that refuses a client; None if the client has access."""
        if self.token:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self.token.encode()):
                return None
            return refusal(HTTPStatus.UNAUTHORIZED, "send the token in the header 'Authorization: Bearer TOKEN'")
        if self.is_open:
            return None
        is_unknown = client.user is Peer.UNKNOWN  # not on Linux
        if client.user is not Peer.OWN_USER and not (is_unknown and is_loopback(unmapped_address(client.address))):
            return refusal(HTTPStatus.FORBIDDEN, "without a token, only the same user on this machine has access")
        # A foreign page may use a host name that leads here (DNS rebinding). It must not read this.
        if not _is_local_name(request.headers.get("host", "")):
            return refusal(HTTPStatus.FORBIDDEN, "use the address of this machine, or localhost, in the URL")
        return None


def _is_local_name(host: str) -> bool:
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    try:
        return not name or name.lower() == "localhost" or ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
