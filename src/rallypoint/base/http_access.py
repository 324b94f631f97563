"""Who may see what a server says about jobs over HTTP. Pure."""

from __future__ import annotations

import hmac
from http import HTTPStatus
from ipaddress import ip_address
from typing import NamedTuple

from rallypoint.base.endpoint import is_loopback, unmapped_address
from rallypoint.base.http import Client, Request, refusal
from rallypoint.base.peer_user import Peer


class Access(NamedTuple):
    """Which clients may see jobs: those with the `token`; without one this user and root on this machine, or all
    (`is_open`).
    """

    token: str = ""
    is_open: bool = False

    def refusal_for(self, request: Request, client: Client) -> bytes | None:
        """The reply to who may not; None for who may.

        Args:
            request: what is asked for.
            client: who asks.
        """
        if self.token:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.token.encode()):
                return None
            return refusal(HTTPStatus.UNAUTHORIZED, "give the token as 'Authorization: Bearer TOKEN'")
        if self.is_open:
            return None
        is_unknown = client.user is Peer.UNKNOWN  # not on Linux
        if client.user is not Peer.OWN_USER and not (is_unknown and is_loopback(unmapped_address(client.address))):
            return refusal(HTTPStatus.FORBIDDEN, "without a token this is only for the same user on the machine itself")
        # A name that leads here may belong to a page from elsewhere, which must not read this (DNS rebinding).
        if not _is_local_name(request.headers.get("host", "")):
            return refusal(HTTPStatus.FORBIDDEN, "ask for this machine by its address, or as localhost")
        return None


def _is_local_name(host: str) -> bool:
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    try:
        return not name or name.lower() == "localhost" or ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
