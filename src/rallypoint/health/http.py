"""Requests and replies of the health server: bytes in, bytes out, nothing touched.

As little HTTP as a probe needs: one GET or HEAD, no body, and the connection is closed after the reply.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple

MAX_REQUEST = 8192
"""Of a request's head; who sends more is refused."""

_LINE = re.compile(rb"([A-Z]{1,16}) (\S{1,2048}) HTTP/1\.[01]")
_METHODS = ("GET", "HEAD")


class HttpRequest(NamedTuple):
    """The first line of a request; `path` is without what follows a `?`."""

    method: str
    path: str


class HealthView(NamedTuple):
    """What is known when a request comes.

    `age` is the time in seconds since the agent's last progress, `timeout` how long that may be. `trouble` is a
    sentence if it could not be found out.
    """

    age: float
    timeout: float
    status: Mapping[str, object]
    trouble: str = ""

    @property
    def well(self) -> bool:
        """Whether the agent gets on."""
        return not self.trouble and self.age <= self.timeout


def read_request(head: bytes) -> HttpRequest | None:
    """The request of a head; None if it is none."""
    found = _LINE.fullmatch(head.partition(b"\r\n")[0])
    if found is None:
        return None
    method, target = (part.decode("latin-1") for part in found.groups())
    return HttpRequest(method, target.partition("?")[0])


def refusal_status(request: HttpRequest | None) -> HTTPStatus | None:
    """Why a request gets no answer; None if it gets one."""
    if request is None:
        return HTTPStatus.BAD_REQUEST
    if request.path not in _PAGES:
        return HTTPStatus.NOT_FOUND
    return None if request.method in _METHODS else HTTPStatus.METHOD_NOT_ALLOWED


def respond(request: HttpRequest, health: HealthView) -> bytes:
    """The reply to a request that is not refused."""
    status, body = _PAGES[request.path](health)
    return response(status, body, bodiless=request.method == "HEAD")


def response(status: HTTPStatus, fields: Mapping[str, object], bodiless: bool = False) -> bytes:
    """A whole reply, with JSON for a body.

    Args:
        status: the reply's.
        fields: of the body.
        bodiless: leave the body away, but say how long it would be.
    """
    body = json.dumps(fields, default=str).encode() + b"\n"
    head = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        head.append(f"Allow: {', '.join(_METHODS)}")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + (b"" if bodiless else body)


def refused_response(status: HTTPStatus) -> bytes:
    """The reply to a request that is refused."""
    return response(status, {"error": status.phrase})


def _healthz(health: HealthView) -> tuple[HTTPStatus, dict[str, object]]:
    status = HTTPStatus.OK if health.well else HTTPStatus.SERVICE_UNAVAILABLE
    return status, _health_of(health)


def _status(health: HealthView) -> tuple[HTTPStatus, dict[str, object]]:
    return HTTPStatus.OK, {**health.status, **_health_of(health)}


def _health_of(health: HealthView) -> dict[str, object]:
    shown: dict[str, object] = {
        "healthy": health.well,
        "seconds_since_progress": round(health.age, 3),
        "timeout_seconds": health.timeout,
    }
    return {**shown, "trouble": health.trouble} if health.trouble else shown


_PAGES = {"/healthz": _healthz, "/status": _status}
