"""Rendezvous that programs build themselves: over any backend or store, or with manually assigned ranks.

torch's dynamic rendezvous relies on the clocks of all hosts; this one counts heartbeats
(`rallypoint.control.membership.rules`). A backend stores bytes in Rallypoint's own form, not pickled objects.
Rallypoint's own `c10d` has a control plane instead.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from tempfile import mkstemp
from typing import Any

from rallypoint.base.clock import Deadline
from rallypoint.base.endpoint import Endpoint, is_this_machine, outward_address, parse_endpoint
from rallypoint.base.errors import UserError
from rallypoint.base.log import get_logger
from rallypoint.control.membership.state import Close, Settings, State
from rallypoint.control.protocol.codec import decode_state
from rallypoint.control.protocol.errors import RendezvousConnectionError, RendezvousError, RendezvousTimeoutError
from rallypoint.control.protocol.messages import Deliver, JobEnded, JoinRefused, LinkLost, Notification, Placement
from rallypoint.rendezvous.backends.options import rank_hint, settings_of, worker_stores
from rallypoint.rendezvous.backends.static import create_handler as create_static_handler
from rallypoint.rendezvous.elastic import ControlPlane, ElasticHandler, own_node
from rallypoint.rendezvous.handler import RendezvousInfo
from rallypoint.rendezvous.params import C10D_PORT, RendezvousParameters
from rallypoint.rendezvous.shared_state import RendezvousBackend, SharedStateLink, StoreRendezvousBackend
from rallypoint.store.api import Store, seconds
from rallypoint.store.client import TCPStore
from rallypoint.store.errors import StoreConnectionError, StoreError, StoreTimeoutError
from rallypoint.store.filestore import FileStore
from rallypoint.store.prefix import ForwardingStore, PrefixStore

__all__ = [
    "DEFAULT_PORT",
    "C10dRendezvousBackend",
    "DynamicRendezvousHandler",
    "RendezvousSettings",
    "RendezvousTimeout",
    "StaticTCPRendezvous",
    "create_backend",
    "create_handler",
]

DEFAULT_PORT = C10D_PORT

log = get_logger(__name__)

_DEFAULTS = {"join": 600, "last_call": 30, "close": 30, "heartbeat": 5}


class RendezvousTimeout:
    """Time limits for the steps of a rendezvous.

    Args:
        join: until the minimum number of nodes has joined; 600 s by default.
        last_call: for more nodes to join after that; 30 s.
        close: for closing the rendezvous; 30 s.
        heartbeat: for one sign of life; 5 s.

    Raises:
        UserError: a time is not positive.
    """

    def __init__(
        self,
        join: timedelta | None = None,
        last_call: timedelta | None = None,
        close: timedelta | None = None,
        heartbeat: timedelta | None = None,
    ) -> None:
        self.join = _positive("join", join)
        self.last_call = _positive("last_call", last_call)
        self.close = _positive("close", close)
        self.heartbeat = _positive("heartbeat", heartbeat)


def _positive(name: str, time: timedelta | None) -> timedelta:
    if time is None:
        return timedelta(seconds=_DEFAULTS[name])
    if time <= timedelta(0):
        raise UserError(
            f"the {name} timeout {time} is not positive; pass a positive one, or None for {_DEFAULTS[name]} s"
        )
    return time


@dataclass(repr=False, eq=False, frozen=True)
class RendezvousSettings:
    """The settings of a rendezvous."""

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout
    keep_alive_interval: timedelta
    keep_alive_max_attempt: int
    cas_backoff_max_seconds: float = 0.0


class _GivenBackend(ControlPlane):
    """A handler's backend, and this node's link to the state in it."""

    def __init__(self, params: RendezvousParameters, backend: RendezvousBackend) -> None:
        super().__init__(settings_of(params, counts_heartbeats=True), rank_hint=rank_hint(params))
        self._given = backend
        self._address = params.local_addr

    def open(self, deliver: Deliver, deadline: Deadline) -> SharedStateLink:
        address = self._address or outward_address()
        return SharedStateLink(self._given, self.settings, own_node(address), address, deliver)


class DynamicRendezvousHandler(ElasticHandler):
    """One node's part in a rendezvous whose state is in a backend. Create it with `from_backend`.

    Until it joins, it sends each query to the backend, whose exceptions pass through; from then on only the handler's
    own thread uses the backend.
    """

    def __init__(self, params: RendezvousParameters, store: Store, backend: RendezvousBackend) -> None:
        """`store` becomes `RendezvousInfo.store`; from now on, only this handler may use `backend`."""
        self._state_in = _GivenBackend(params, backend)
        super().__init__(params.backend, self._state_in, worker_stores(params))
        self._own_settings = self._state_in.settings
        self._given_store = store
        self._given_backend = backend
        self._over = threading.Event()

    @classmethod
    def from_backend(
        cls,
        run_id: str,
        store: Any,
        backend: RendezvousBackend,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        timeout: RendezvousTimeout | None = None,
        keep_alive_interval: int = 5,
        keep_alive_max_attempt: int = 3,
        cas_backoff_max_seconds: float = 0.0,
    ) -> DynamicRendezvousHandler:
        """Create a handler that agrees with the others through `backend`.

        Args:
            run_id: the job's id.
            store: shared by all nodes, Rallypoint's or torch's; each round has its own prefix in it.
            backend: stores the state of the rendezvous.
            min_nodes: the minimum number of nodes in a round.
            max_nodes: the maximum number of nodes in a round.
            local_addr: the address at which others reach this node; detected by default.
            timeout: time limits for the steps, None for the defaults; rounded up to whole seconds.
            keep_alive_interval: seconds between two signs of life.
            keep_alive_max_attempt: how many signs of life may be missing.
            cas_backoff_max_seconds: the maximum random pause after another node's write to `backend` came first.

        Raises:
            UserError: a number is out of range.
        """
        times = timeout or RendezvousTimeout()
        options = {f"{name}_timeout": _whole_seconds(getattr(times, name)) for name in _DEFAULTS} | {
            "keep_alive_interval": keep_alive_interval,
            "keep_alive_max_attempt": keep_alive_max_attempt,
            "cas_backoff_max_seconds": cas_backoff_max_seconds,
        }
        params = RendezvousParameters(backend.name, "", run_id, min_nodes, max_nodes, local_addr, **options)
        return cls(params, adapted_store(store), backend)

    @property
    def settings(self) -> RendezvousSettings:
        """The settings of the handler."""
        own = self._own_settings
        return RendezvousSettings(
            own.run_id,
            own.min_nodes,
            own.max_nodes,
            RendezvousTimeout(
                timedelta(seconds=own.join_timeout),
                timedelta(seconds=own.last_call_timeout),
                timedelta(seconds=own.close_timeout),
                timedelta(seconds=own.heartbeat_timeout),
            ),
            timedelta(seconds=own.keep_alive_interval),
            own.keep_alive_max_attempt,
            own.cas_backoff_max_seconds,
        )

    def is_closed(self) -> bool:
        """Whether the rendezvous has ended for all nodes."""
        return self._state().closed if self._link is None else super().is_closed()

    def num_nodes_waiting(self) -> int:
        """How many nodes are waiting for the next round."""
        return len(self._state().wait_list) if self._link is None else super().num_nodes_waiting()

    def set_closed(self) -> None:
        """End the rendezvous for all nodes. Returns once it has ended.

        Raises:
            RendezvousTimeoutError: this takes longer than the close timeout.
        """
        if self._link is None:
            self._close_alone()
            return
        super().set_closed()
        if not self._over.wait(self._own_settings.close_timeout):
            raise RendezvousTimeoutError(_not_closed(self._own_settings))
        if isinstance(self._final_notification, LinkLost) and self._final_notification.error is not None:
            raise self._final_notification.error

    def shutdown(self) -> bool:
        """Leave; the job continues without us. Returns False if the backend cannot be reached."""
        try:
            if self._link is None:
                self._state()
        except RendezvousError as error:
            log.warning("could not leave the rendezvous %r cleanly: %s", self._own_settings.run_id, error)
            return False
        finally:
            super().shutdown()
        return not (isinstance(self._link, SharedStateLink) and isinstance(self._link.broken, RendezvousError))

    def info(self, placement: Placement) -> RendezvousInfo:
        """A placement in torch's form. The store is the handler's, not the workers'."""
        info = super().info(placement)
        prefix = f"torch.rendezvous.{self._own_settings.run_id}.{placement.round}"
        store = PrefixStore(prefix, self._given_store)
        return RendezvousInfo(store, info.rank, info.world_size, info.bootstrap_store_info)

    def _state(self) -> State:
        stored = self._given_backend.get_state()
        return State() if stored is None else decode_state(stored[0])

    def _close_alone(self) -> None:
        link = self._state_in.open(lambda _notification: None, Deadline.after(self._own_settings.close_timeout))
        link.send(Close())
        link.close()
        if link.broken is not None:
            raise link.broken
        if link.is_busy:
            raise RendezvousTimeoutError(_not_closed(self._own_settings))

    def _on_notification(self, notification: Notification) -> None:
        super()._on_notification(notification)
        if isinstance(notification, JobEnded | JoinRefused | LinkLost):
            self._over.set()


def create_handler(store: Any, backend: RendezvousBackend, params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Create a handler over `backend` with the options in `params` (contract section 4.2).

    Args:
        store: shared by all nodes, Rallypoint's or torch's.
        backend: stores the state of the rendezvous.
        params: the job, its limits, and time limits.

    Raises:
        UserError: an option cannot work.
    """
    return DynamicRendezvousHandler(params, adapted_store(store), backend)


def _not_closed(settings: Settings) -> str:
    return (
        f"the rendezvous {settings.run_id!r} could not be closed within {settings.close_timeout:g} s; check whether "
        "its backend answers, or raise close_timeout"
    )


def _whole_seconds(time: timedelta) -> int:
    return -(-time // timedelta(seconds=1))


# The state in a store


class C10dRendezvousBackend(StoreRendezvousBackend):
    """The state in one key of a store, which may also be torch's."""

    def __init__(self, store: Any, run_id: str) -> None:
        super().__init__(adapted_store(store), run_id)


def create_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Store]:
    """Create a backend and its store, from the options of `c10d` (contract section 4.4).

    Raises:
        UserError: an option cannot work.
        RendezvousConnectionError: the store cannot be reached or served.
    """
    kind = str(params.get("store_type", "tcp")).strip().lower()
    if kind not in _MAKERS:
        raise UserError(f"rendezvous option store_type={kind!r} is not supported; choose one of {', '.join(_MAKERS)}")
    store = _MAKERS[kind](params)
    return C10dRendezvousBackend(store, params.run_id), store


def _file(params: RendezvousParameters) -> Store:
    path = params.endpoint
    if not path:
        handle, path = mkstemp()
        os.close(handle)
    try:
        return FileStore(path)
    except StoreError as error:
        raise RendezvousConnectionError(f"the file {path!r} cannot be used for a rendezvous: {error}") from error


def _tcp(params: RendezvousParameters) -> Store:
    host, port = parse_endpoint(params.endpoint, C10D_PORT)
    timeout = params.get_as_int("read_timeout", 60)
    assert timeout is not None
    if timeout <= 0:
        raise UserError(f"rendezvous option read_timeout={timeout} is not positive; set it to 1 or more")
    is_host = params.get_as_bool("is_host")
    attempts = (is_host,) if is_host is not None else (True, False) if is_this_machine(host) else (False,)
    last: StoreError | None = None
    for serves in attempts:  # another process on this machine may already serve
        try:
            return TCPStore(host, port, is_master=serves, multi_tenant=True, timeout=timeout)
        except StoreError as error:
            last = error
    raise RendezvousConnectionError(f"the rendezvous store cannot be reached: {last}") from last


_MAKERS = {"tcp": _tcp, "file": _file}


# Manually assigned ranks


class StaticTCPRendezvous(ElasticHandler):
    """A rendezvous of nodes with manually assigned ranks.

    Args:
        master_addr: the address of the node of rank 0.
        master_port: the port on which it listens.
        rank: this node's rank.
        world_size: the number of nodes.
        run_id: the job's id.
        timeout: seconds for all nodes to arrive.

    Raises:
        UserError: the rank is out of range, or the time is not positive.
    """

    def __init__(
        self, master_addr: str, master_port: int, rank: int, world_size: int, run_id: str, timeout: int
    ) -> None:
        endpoint = str(Endpoint(master_addr, master_port))
        handler = create_static_handler(
            RendezvousParameters("static", endpoint, run_id, world_size, world_size, rank=rank, timeout=timeout)
        )
        vars(self).update(vars(handler))
        self.master_addr, self.master_port = master_addr, master_port
        self.rank, self.world_size, self.timeout = rank, world_size, timedelta(seconds=timeout)


# Stores from third parties


def adapted_store(store: Any) -> Store:
    """`store` itself if it is Rallypoint's, else a store that forwards every call to it."""
    return store if isinstance(store, Store) else _Foreign(store)


class _Foreign(ForwardingStore):
    """Any object with the methods of torch's `Store`. Its exceptions become Rallypoint's store errors."""

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=seconds(self._store.timeout))

    def to_torch(self) -> Any:
        return self._store

    def clone(self) -> _Foreign:
        return _Foreign(self._call("clone"))

    def _limit(self, timeout: timedelta | float | None) -> timedelta:
        return self.timeout if timeout is None else timedelta(seconds=seconds(timeout))

    def _value(self, value: str | bytes) -> str:
        return value if isinstance(value, str) else value.decode()

    def _call(self, method: str, *arguments: object) -> Any:
        try:
            return getattr(self._store, method)(*arguments)
        except StoreError:
            raise
        except (RuntimeError, LookupError) as error:
            raise _kind(error)(f"the store {type(self._store).__name__} raised: {error}") from error


def _kind(error: Exception) -> type[StoreError]:
    """torch's own types cannot be imported here; its messages name timeouts."""
    if type(error).__name__ == "DistNetworkError":
        return StoreConnectionError
    return StoreTimeoutError if "timeout" in str(error).lower() or isinstance(error, LookupError) else StoreError
