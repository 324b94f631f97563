"""The agent's health as replies to requests. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

from rallypoint.base.http import Request, RequestError, parse, refusal, response


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
    try:
        request = parse(head)
    except RequestError as error:
        return refusal(error.status)
    return reply_to(request, view) or refusal(HTTPStatus.NOT_FOUND)


def reply_to(request: Request, view: Callable[[], HealthView]) -> bytes | None:
    """The same for a request that was parsed; None where it is for something else."""
    page = _PAGES.get(request.path)
    return None if page is None else response(*page(view()), bodiless=request.bodiless)


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


def _ready(health: HealthView) -> tuple[HTTPStatus, dict[str, object]]:
    ready = health.well and health.status.get("state") == "HEALTHY"
    return HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE, {**_health_of(health), "ready": ready}


STATUS = "/status"
"""The one page with more than yes or no."""

_PAGES = {"/healthz": _healthz, "/livez": _healthz, "/readyz": _ready, STATUS: _status}
