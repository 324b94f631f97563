"""Small functions of torch, for programs that start jobs themselves (contract section 8, `elastic.utils`)."""

from __future__ import annotations

import logging
import os
import socket
import sys

from rallypoint.base import log as own_log
from rallypoint.base.endpoint import parse_endpoint
from rallypoint.base.errors import UserError
from rallypoint.store.client import TCPStore
from rallypoint.store.collectives import barrier
from rallypoint.store.errors import StoreConnectionError

__all__ = [
    "create_c10d_store",
    "get_env_variable_or_raise",
    "get_free_port",
    "get_logger",
    "get_socket_with_port",
    "parse_rendezvous_endpoint",
]

log = own_log.get_logger(__name__)

_ALL_WORKERS_JOINED = "_tcp_store/num_members"
"""torch's own prefix of keys for this barrier, since some workers may use torch."""


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
    """Connect to a store; with `is_server`, also serve it.

    Args:
        is_server: whether this process serves.
        server_addr: the server's name or address.
        server_port: the server's port. With -1 (if nobody else uses the store) or 0 (for a server), the kernel chooses
            one (see the store's `port`).
        world_size: how many processes will use the store, including the server's.
        timeout: seconds for connecting and for all waits of the store.
        wait_for_workers: return only when all have connected.
        retries: accepted for compatibility with torch, without effect: a port that the kernel chooses is free.
        use_libuv: accepted for compatibility with torch, without effect; `USE_LIBUV` sets the store's `libuvBackend`.

    Raises:
        UserError: no port is set, and others will connect.
        StoreConnectionError: no store answered in time, the port cannot be used, or a client has none.
        StoreTimeoutError: not all connected in time.
    """
    if use_libuv is not None:
        log.warning("use_libuv=%s has no effect; set USE_LIBUV to 0 or 1 instead", use_libuv)
    if server_port == -1 and world_size > 1:
        raise UserError(f"a store for {world_size} processes needs a port that all of them know; set server_port")
    if not is_server and server_port <= 0:
        raise StoreConnectionError(f"server_port={server_port} is not a valid port; set it to the server's port")
    store = TCPStore(
        server_addr,
        max(0, server_port),
        world_size=world_size,
        is_master=is_server,
        timeout=timeout,
        wait_for_workers=wait_for_workers,
        use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
    )
    if wait_for_workers:
        barrier(store, world_size, _ALL_WORKERS_JOINED, barrier_timeout=timeout)
    return store


def get_logger(name: str | None = None) -> logging.Logger:
    """A logger at the level in `LOGLEVEL`, or WARNING.

    Args:
        name: the logger's name; by default the name of the calling module.

    Raises:
        UserError: `LOGLEVEL` is not a level.
    """
    logger = logging.getLogger(name or str(sys._getframe(1).f_globals.get("__name__", "")))
    logger.setLevel(own_log.log_level())
    return logger


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Host and port of an endpoint; localhost if it is empty.

    Raises:
        UserError: the host or the port is invalid.
    """
    host, port = parse_endpoint(endpoint, default_port)
    return host, port


def get_free_port() -> int:
    """A port that was free on all addresses a moment ago. Prefer `get_socket_with_port`, which reserves its port."""
    with get_socket_with_port() as bound:
        return int(bound.getsockname()[1])


def get_socket_with_port() -> socket.socket:
    """A socket that reserves a port which is free on all addresses, and does not listen; the caller closes it.

    Raises:
        OSError: the kernel has no free port.
    """
    try:
        return _bound(socket.AF_INET6, "::")
    except OSError:  # IPv6 is missing or disabled in the kernel
        return _bound(socket.AF_INET, "")


def _bound(family: int, address: str) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, 0))  # without SO_REUSEADDR, with which another process could bind it too
    except BaseException:
        listener.close()
        raise
    return listener


def get_env_variable_or_raise(env_name: str) -> str:
    """An environment variable's value; UserError if it is not set."""
    value = os.environ.get(env_name)
    if value is None:
        raise UserError(f"Environment variable {env_name} expected, but not set")
    return value
