"""Asks a silent service whether it is a torch TCPStore, to name it in an error.

torch's server keeps silent on a greeting that it does not know (contract section 9.2), so a node that met one would
otherwise only be able to say that nobody answered.
"""

from __future__ import annotations

import asyncio

from rallypoint.base.endpoint import Endpoint
from rallypoint.store.wire import Op, encode, greeting

_TIMEOUT = 2.0
_NONCE = 0x52414C4C


async def answers_as_torch_store(endpoint: Endpoint) -> bool:
    """Whether the service at `endpoint` answers the first messages of the TCPStore protocol; within 2 s."""
    try:
        async with asyncio.timeout(_TIMEOUT):
            reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
            try:
                writer.write(greeting() + encode(Op.PING, _NONCE))
                return await reader.readexactly(4) == _NONCE.to_bytes(4, "little")
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False
