"""Making a store with one call, as torch's `elastic.utils.distributed` does."""

from __future__ import annotations

from rallypoint.base.errors import UserError
from rallypoint.store.client import TCPStore


def create_c10d_store(
    is_server: bool,
    server_addr: str,
    server_port: int = -1,
    world_size: int = 1,
    timeout: float = 600,
    wait_for_workers: bool = True,
    retries: int = 3,
    use_libuv: bool | None = None,
) -> TCPStore:
    """A store on a server, and with `is_server` the server too.

    Args:
        is_server: whether this process serves.
        server_addr: the server's name or address.
        server_port: the server's port; for a server, -1 or 0 lets the kernel choose (see the store's `port`).
        world_size: how many will use the store, the server's process included.
        timeout: seconds for connecting and wherever the store waits.
        wait_for_workers: return only when all have come.
        retries: accepted as torch's callers give it, and without effect: what the kernel chooses is free.
        use_libuv: accepted as torch's callers give it, and without effect.

    Raises:
        UserError: a client was given no port.
        StoreConnectionError: no store answered in time, or the port cannot be listened on.
        StoreTimeoutError: not all came in time.
    """
    if not is_server and server_port <= 0:
        raise UserError(f"server_port={server_port} is where no server can be; give a client the server's port")
    return TCPStore(
        server_addr,
        max(0, server_port),
        world_size=world_size,
        is_master=is_server,
        timeout=timeout,
        wait_for_workers=wait_for_workers,
    )
