"""Detects which service answers at an endpoint where a connection broke: gRPC hides what was sent. Done once, and only
then.

The connection is opened anew with HTTP/2's first words, and the first thing that comes back is looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import NamedTuple

from rallypoint.base.endpoint import Endpoint

_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The preface, and empty settings (RFC 9113, section 3.4)."""
_SETTINGS = 4
_TLS_ALERT = 0x15


class ServiceDiagnosis(NamedTuple):
    """The problem that was found, and what to do."""

    problem: str
    remedy: str


_NOT_ETCD = "check the endpoint"


async def detect_service(endpoint: Endpoint, tls: ssl.SSLContext | None, timeout_s: float) -> ServiceDiagnosis | None:
    """Why what listens there will never speak gRPC with us; None if nothing is wrong, or cannot be found out now."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_greeting(endpoint, tls)
    except ssl.SSLError as error:
        return ServiceDiagnosis(
            f"ended the TLS connection ({ssl_reason(error)})", "check `cert` and `key`, and whom the server trusts"
        )
    except (OSError, EOFError):  # TimeoutError is an OSError
        return None


def ssl_reason(error: ssl.SSLError) -> str:
    """OpenSSL's name of it, as words."""
    return (error.reason or str(error)).lower().replace("_", " ")


async def _read_greeting(endpoint: Endpoint, tls: ssl.SSLContext | None) -> ServiceDiagnosis | None:
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=tls)
    try:
        writer.write(_HELLO)
        first = await reader.readexactly(9)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    if first[3] == _SETTINGS:
        return None
    if first[0] == _TLS_ALERT:
        return ServiceDiagnosis("requires TLS", "give protocol=https, and `cacert`")
    if first.startswith(b"HTTP/1"):
        return ServiceDiagnosis("speaks HTTP/1, and not the v3 API of etcd", _NOT_ETCD)
    return ServiceDiagnosis(f"does not speak the v3 API of etcd (its first bytes: {first!r})", _NOT_ETCD)
