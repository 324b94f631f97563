"""What an answer that is an error means: whether it was done, and whether to ask again and whom. Pure.

etcd's status codes are coarse ("unavailable" is said of a member without a leader, which has done nothing, and of one
whose leader changed while it was doing it), so most is read off the text, which etcd's own clients rely on too.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


class Fate(Enum):
    """What became of a request."""

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
    """There are no users in this cluster, so that nobody can log in."""
    REFUSED = auto()
    """It was not done, and asking again cannot help."""


class Verdict(NamedTuple):
    """The fate of a request, and what to tell: what was wrong, and what to do."""

    fate: Fate
    wrong: str
    advice: str = ""


_LOOK = "look at the logs of etcd"
_GRANT = "grant the user reading and writing of the prefix"
_NAME_YOURSELF = "it knows its users: give a user and a password"

_TEXTS: tuple[tuple[str, Fate, str], ...] = (
    ("no leader", Fate.NOT_DONE, "see whether most of its members run"),
    ("too many requests", Fate.NOT_DONE, _LOOK),
    ("rpc not supported for learner", Fate.NOT_DONE, "name members that vote"),
    ("invalid auth token", Fate.LOGIN, "check user and password"),
    ("revision of auth store is old", Fate.LOGIN, "check user and password"),
    ("authentication failed, invalid user ID or password", Fate.REFUSED, "check user and password"),
    ("user name is empty", Fate.REFUSED, _NAME_YOURSELF),
    ("authentication is not enabled", Fate.NO_USERS, "leave out user and password"),
    ("permission denied", Fate.REFUSED, _GRANT),
    ("requested lease not found", Fate.LEASE_GONE, "grant a new one"),
    ("lease already exists", Fate.LEASE_EXISTS, "choose another id"),
    ("database space exceeded", Fate.REFUSED, "compact and defragment it, then disarm its alarm"),
    ("request is too large", Fate.REFUSED, "raise its --max-request-bytes"),
)

_UNIMPLEMENTED = 12
_UNSURE_CODES = frozenset({1, 2, 4, 10, 13, 14})
"""Cancelled, unknown, deadline exceeded, aborted, internal, unavailable: somewhere on the way, something broke."""


def judge(code: int, text: str, named: bool) -> Verdict:
    """What the status `code` of gRPC with `text` means, said to somebody who gave a user's name or did not."""
    for part, fate, advice in _TEXTS:
        if part in text:
            return Verdict(fate, _quoted(text), _NAME_YOURSELF if advice is _GRANT and not named else advice)
    if code == _UNIMPLEMENTED:
        return Verdict(Fate.REFUSED, "does not speak the v3 API of etcd", "check the endpoint")
    if code in _UNSURE_CODES:
        return Verdict(Fate.UNKNOWN, _quoted(text), _LOOK)
    return Verdict(Fate.REFUSED, _quoted(text), _LOOK)


def _quoted(text: str) -> str:
    return f"answered {text!r}"
