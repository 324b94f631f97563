"""Small functions of torch, for programs that start jobs by themselves (contract section 8, `elastic.utils`)."""

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
"""The prefix of torch's own keys for this barrier: some of those who come may be torch's."""


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
        server_port: the server's port; for the only one to use the store, -1 lets the kernel choose, and for a server
            0 does (see the store's `port`).
        world_size: how many will use the store, the server's process included.
        timeout: seconds for connecting and wherever the store waits.
        wait_for_workers: return only when all have come.
        retries: accepted as torch's callers give it, and without effect: what the kernel chooses is free.
        use_libuv: accepted as torch's callers give it, and without effect; `USE_LIBUV` says what the store's
            `libuvBackend` is.

    Raises:
        UserError: there is no port, and others are to come.
        StoreConnectionError: no store answered in time, the port cannot be listened on, or a client was given none.
        StoreTimeoutError: not all came in time.
    """
    if use_libuv is not None:
        log.warning("use_libuv=%s has no effect; set USE_LIBUV to 0 or 1 instead", use_libuv)
    if server_port == -1 and world_size > 1:
        raise UserError(f"a store that {world_size} will use needs a port that they all know; give server_port")
    if not is_server and server_port <= 0:
        raise StoreConnectionError(f"server_port={server_port} is not a port; give a client the server's port")
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
    """A logger at the level that `LOGLEVEL` names, or WARNING.

    Args:
        name: of the logger; None for the name of the module that asks.

    Raises:
        UserError: `LOGLEVEL` names no level.
    """
    logger = logging.getLogger(name or str(sys._getframe(1).f_globals.get("__name__", "")))
    logger.setLevel(own_log.log_level())
    return logger


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Host and port of an endpoint; localhost where it is empty.

    Raises:
        UserError: the host or the port cannot be one.
    """
    host, port = parse_endpoint(endpoint, default_port)
    return host, port


def get_free_port() -> int:
    """A port that was free on all addresses a moment ago. Prefer `get_socket_with_port`, whose port is held."""
    with get_socket_with_port() as bound:
        return int(bound.getsockname()[1])


def get_socket_with_port() -> socket.socket:
    """A socket that holds a port which is free on all addresses, and does not listen; the caller closes it.

    Raises:
        OSError: the kernel gives out no port.
    """
    try:
        return _bound(socket.AF_INET6, "::")
    except OSError:  # a kernel without IPv6, or where it is switched off
        return _bound(socket.AF_INET, "")


def _bound(family: int, address: str) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, 0))  # without SO_REUSEADDR, by which somebody else could bind it too
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
