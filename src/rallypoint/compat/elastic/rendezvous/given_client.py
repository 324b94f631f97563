"""Clients of etcd's v2 API that third parties hand over: Rallypoint's, or python-etcd's, of which we take the place."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from rallypoint.base.endpoint import Endpoint
from rallypoint.base.errors import UserError
from rallypoint.etcd.api import Credentials, EtcdTls
from rallypoint.rendezvous.backends.etcd_options import DEFAULT_PORT
from rallypoint.rendezvous.backends.etcd_v2_http import EtcdV2Client

__all__ = ["given_client"]


def given_client(client: Any) -> EtcdV2Client:
    """A client of Rallypoint's own for the etcd that `client` is of.

    Args:
        client: Rallypoint's own, or any object with python-etcd's `base_uri`, and where it needs them its `username`,
            `password`, and the certificates in its connection pool.

    Raises:
        UserError: it does not say where its etcd is.
    """
    if isinstance(client, EtcdV2Client):
        return client.clone()
    place = urlsplit(str(getattr(client, "base_uri", "")))
    if not place.hostname:
        raise UserError(f"{client!r} does not say where its etcd is; give what `EtcdServer.get_client` returns")
    files = getattr(getattr(client, "http", None), "connection_pool_kw", {})
    tls = EtcdTls(files.get("ca_certs"), files.get("cert_file"), files.get("key_file"))
    user = getattr(client, "username", None)
    return EtcdV2Client(
        [Endpoint(place.hostname, place.port or DEFAULT_PORT)],
        tls if place.scheme == "https" else None,
        Credentials(user, getattr(client, "password", None) or "") if user else None,
        float(getattr(client, "read_timeout", None) or 60),
    )
