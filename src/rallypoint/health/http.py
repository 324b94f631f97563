"""Requests and replies of the health server: bytes in, bytes out. Pure.

As little HTTP as a probe needs: one GET or HEAD without a body, and the connection is closed after the reply.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

MAX_REQUEST = 8192
"""Bytes of a request's head; a larger one is refused."""

_LINE = re.compile(rb"([A-Z]{1,16}) (\S{1,2048}) HTTP/1\.[01]")
_METHODS = (b"GET", b"HEAD")


class HealthView(NamedTuple):
    """The agent's health: `age` is the seconds since its last progress, `timeout` how long that may be.

    `trouble` is a sentence if that could not be found out.
    """

    age: float
    timeout: float
    status: Mapping[str, object]
    trouble: str = ""

    @property
    def well(self) -> bool:
        """Whether the agent makes progress."""
        return not self.trouble and self.age <= self.timeout


def reply(head: bytes, view: Callable[[], HealthView]) -> bytes:
    """The reply to a request, of which `head` is all up to the blank line; `view` is called if it is not refused."""
    found = _LINE.fullmatch(head.partition(b"\r\n")[0])
    if found is None:
        return refusal(HTTPStatus.BAD_REQUEST)
    method, target = found.groups()
    page = _PAGES.get(target.partition(b"?")[0])
    if page is None:
        return refusal(HTTPStatus.NOT_FOUND)
    if method not in _METHODS:
        return refusal(HTTPStatus.METHOD_NOT_ALLOWED)
    return response(*page(view()), bodiless=method == b"HEAD")


def refusal(status: HTTPStatus) -> bytes:
    """The reply to a request that is refused."""
    return response(status, {"error": status.phrase})


def response(status: HTTPStatus, fields: Mapping[str, object], bodiless: bool = False) -> bytes:
    """A whole reply with `fields` as JSON; `bodiless` leaves the body out, but not its length."""
    body = json.dumps(fields, default=str).encode() + b"\n"
    head = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        head.append("Allow: GET, HEAD")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + (b"" if bodiless else body)


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


_PAGES = {b"/healthz": _healthz, b"/status": _status}
