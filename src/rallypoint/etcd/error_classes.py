"""Classifies errors of etcd: whether the request was done, and whether to retry and with which member. Pure.

etcd's status codes are coarse ("unavailable" is said of a member without a leader, which has done nothing, and of one
whose leader changed while it was doing it), so most is read off the text, which etcd's own clients rely on too.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


class RequestOutcome(Enum):
    """The outcome of a request."""

    NOT_DONE = auto()
    """It was not done; another member may do it."""
    UNKNOWN = auto()
    """It may have been done."""
    LOGIN = auto()
    """It was not done: the member wants a new token."""
    LEASE_GONE = auto()
    """It was not done: its lease is gone."""
    LEASE_EXISTS = auto()
    """There is a lease with this id already."""
    NO_USERS = auto()
    """There are no users in this cluster, so a login is not possible."""
    REFUSED = auto()
    """It was not done, and asking again cannot help."""


class Diagnosis(NamedTuple):
    """The outcome of a request, what was wrong, and what to do."""

    outcome: RequestOutcome
    problem: str
    remedy: str = ""


_LOOK_AT_ETCD_LOG = "look at the logs of etcd"
_GRANT = "grant the user reading and writing of the prefix"
_GIVE_USER = "it knows its users: give a user and a password"

_BY_TEXT: tuple[tuple[str, RequestOutcome, str], ...] = (
    ("no leader", RequestOutcome.NOT_DONE, "see whether most of its members run"),
    ("too many requests", RequestOutcome.NOT_DONE, _LOOK_AT_ETCD_LOG),
    ("rpc not supported for learner", RequestOutcome.NOT_DONE, "name members that vote"),
    ("invalid auth token", RequestOutcome.LOGIN, "check user and password"),
    ("revision of auth store is old", RequestOutcome.LOGIN, "check user and password"),
    ("authentication failed, invalid user ID or password", RequestOutcome.REFUSED, "check user and password"),
    ("user name is empty", RequestOutcome.REFUSED, _GIVE_USER),
    ("authentication is not enabled", RequestOutcome.NO_USERS, "leave out user and password"),
    ("permission denied", RequestOutcome.REFUSED, _GRANT),
    ("requested lease not found", RequestOutcome.LEASE_GONE, "grant a new one"),
    ("lease already exists", RequestOutcome.LEASE_EXISTS, "choose another id"),
    ("database space exceeded", RequestOutcome.REFUSED, "compact and defragment it, then disarm its alarm"),
    ("request is too large", RequestOutcome.REFUSED, "raise its --max-request-bytes"),
)

_UNIMPLEMENTED = 12
_UNSURE_CODES = frozenset({1, 2, 4, 10, 13, 14})
"""Cancelled, unknown, deadline exceeded, aborted, internal, unavailable: somewhere on the way, something broke."""


def classify(code: int, text: str, named: bool) -> Diagnosis:
    """What the status `code` of gRPC with `text` means, said to somebody who gave a user's name or did not."""
    for part, outcome, remedy in _BY_TEXT:
        if part in text:
            return Diagnosis(outcome, _in_quotes(text), _GIVE_USER if remedy is _GRANT and not named else remedy)
    if code == _UNIMPLEMENTED:
        return Diagnosis(RequestOutcome.REFUSED, "does not speak the v3 API of etcd", "check the endpoint")
    if code in _UNSURE_CODES:
        return Diagnosis(RequestOutcome.UNKNOWN, _in_quotes(text), _LOOK_AT_ETCD_LOG)
    return Diagnosis(RequestOutcome.REFUSED, _in_quotes(text), _LOOK_AT_ETCD_LOG)


def _in_quotes(text: str) -> str:
    return f"answered {text!r}"
