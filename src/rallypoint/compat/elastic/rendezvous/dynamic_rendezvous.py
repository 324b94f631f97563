"""In the place of `torch.distributed.elastic.rendezvous.dynamic_rendezvous`: a rendezvous over anybody's backend.

Where torch's counts on the clocks of all hosts, this one counts heartbeats (`rallypoint.membership.liveness`); what the
backend is given to keep is bytes of Rallypoint's own form, not pickled objects.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rallypoint.base.clock import Deadline
from rallypoint.base.endpoint import outward_address
from rallypoint.base.errors import UserError
from rallypoint.base.log import get_logger
from rallypoint.compat.elastic.rendezvous.given_store import given
from rallypoint.compat.reexports import reexports_of
from rallypoint.membership.operations import Close
from rallypoint.membership.state import Settings, State
from rallypoint.protocol.codec import decode_state
from rallypoint.protocol.errors import RendezvousError, RendezvousTimeoutError
from rallypoint.protocol.messages import Deliver, JobEnded, JoinRefused, LinkLost, Notification, Placement
from rallypoint.rendezvous.backend import RendezvousBackend, Token
from rallypoint.rendezvous.backends.options import rank_hint, settings_of, worker_stores
from rallypoint.rendezvous.control_plane import ControlPlane, own_node
from rallypoint.rendezvous.elastic import ElasticHandler
from rallypoint.rendezvous.handler import RendezvousInfo
from rallypoint.rendezvous.params import RendezvousParameters
from rallypoint.rendezvous.shared_state import SharedStateLink
from rallypoint.store.api import Store
from rallypoint.store.prefix import PrefixStore

__all__ = [
    "DynamicRendezvousHandler",
    "RendezvousBackend",
    "RendezvousSettings",
    "RendezvousTimeout",
    "Token",
    "create_handler",
]

__getattr__ = reexports_of(__name__)

log = get_logger(__name__)

_DEFAULTS = {"join": 600, "last_call": 30, "close": 30, "heartbeat": 5}


class RendezvousTimeout:
    """How long the steps of a rendezvous may take.

    Args:
        join: until the minimal number of nodes has joined; 600 s by default.
        last_call: for more to join after that; 30 s.
        close: for the rendezvous to be closed; 30 s.
        heartbeat: for one sign of life; 5 s.

    Raises:
        UserError: one is not positive.
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
        raise UserError(f"the {name} timeout {time} is not positive; give one, or None for {_DEFAULTS[name]} s")
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


class _GivenBackend(ControlPlane):
    """The backend that a handler was given, and this node's link to what is in it."""

    def __init__(self, params: RendezvousParameters, backend: RendezvousBackend) -> None:
        super().__init__(settings_of(params, counts_heartbeats=True), rank_hint=rank_hint(params))
        self._given = backend
        self._address = params.local_addr

    def open(self, deliver: Deliver, deadline: Deadline) -> SharedStateLink:
        address = self._address or outward_address()
        return SharedStateLink(self._given, self.settings, own_node(address), address, deliver)


class DynamicRendezvousHandler(ElasticHandler):
    """One node's part in a rendezvous whose state is in a backend. Make it with `from_backend`.

    Until it joins, each question is asked of the backend, and what that raises goes through; from then on the handler's
    own thread alone talks to the backend.
    """

    def __init__(self, params: RendezvousParameters, store: Store, backend: RendezvousBackend) -> None:
        """`store` is what `RendezvousInfo.store` leads to; `backend` is this handler's alone from now on."""
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
    ) -> DynamicRendezvousHandler:
        """A handler that agrees with the others through `backend`.

        Args:
            run_id: the job's id.
            store: what all nodes share, Rallypoint's or torch's; each round has a prefix of its own in it.
            backend: where the state of the rendezvous is.
            min_nodes: a round needs at least so many nodes.
            max_nodes: a round takes at most so many nodes.
            local_addr: this node's address as others reach it; None to find it out.
            timeout: of the steps, None for the defaults; times are rounded up to whole seconds.
            keep_alive_interval: seconds between two signs of life.
            keep_alive_max_attempt: how many of them may fail to come.

        Raises:
            UserError: a number out of its bounds.
        """
        times = timeout or RendezvousTimeout()
        options = {f"{name}_timeout": _whole(getattr(times, name)) for name in _DEFAULTS} | {
            "keep_alive_interval": keep_alive_interval,
            "keep_alive_max_attempt": keep_alive_max_attempt,
        }
        params = RendezvousParameters(backend.name, "", run_id, min_nodes, max_nodes, local_addr, **options)
        return cls(params, given(store), backend)

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
        )

    def is_closed(self) -> bool:
        """Whether the rendezvous is over for all."""
        return self._state().closed if self._link is None else super().is_closed()

    def num_nodes_waiting(self) -> int:
        """How many nodes wait for the next round."""
        return len(self._state().wait_list) if self._link is None else super().num_nodes_waiting()

    def set_closed(self) -> None:
        """End the rendezvous for all; it is over on return.

        Raises:
            RendezvousTimeoutError: that takes longer than the close timeout.
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
        """Leave; the job goes on without us. Returns False if the backend cannot be reached."""
        try:
            if self._link is None:
                self._state()
        except RendezvousError as error:
            log.warning("the rendezvous %r cannot be left in order: %s", self._own_settings.run_id, error)
            return False
        finally:
            super().shutdown()
        return not (isinstance(self._link, SharedStateLink) and isinstance(self._link.broken, RendezvousError))

    def info(self, placement: Placement) -> RendezvousInfo:
        """A placement as torch's users know it; the store is the one that was given, not the workers'."""
        info = super().info(placement)
        prefix = f"torch.rendezvous.{self._own_settings.run_id}.{placement.round}"
        store = PrefixStore(prefix, self._given_store)
        return RendezvousInfo(store, info.rank, info.world_size, info.bootstrap_store_info)

    def _state(self) -> State:
        found = self._given_backend.get_state()
        return State() if found is None else decode_state(found[0])

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
    """A handler over `backend` with the options in `params` (contract section 4.2).

    Args:
        store: what all nodes share, Rallypoint's or torch's.
        backend: where the state of the rendezvous is.
        params: the job, its bounds, and times.

    Raises:
        UserError: an option cannot work.
    """
    return DynamicRendezvousHandler(params, given(store), backend)


def _not_closed(settings: Settings) -> str:
    return (
        f"the rendezvous {settings.run_id!r} could not be closed within {settings.close_timeout:g} s; see whether its "
        "backend answers, or raise close_timeout"
    )


def _whole(time: timedelta) -> int:
    return -(-time // timedelta(seconds=1))
