"""`etcd-v2`: the state in one key of an etcd that still has the v2 API (contract section 4.10).

The key is `<etcd_prefix>/<run id>`, written by compare-and-swap with the index of its last change as the fencing
token, and kept for two hours after the last write. Who keeps an etcd of its own for this uses `etcd`, which costs each
node a constant number of messages for a round; this one costs each node one write every `keep_alive_interval`.
"""

from __future__ import annotations

import base64
import binascii
import threading
from typing import TYPE_CHECKING

from rallypoint.base.clock import Deadline
from rallypoint.base.endpoint import own_address
from rallypoint.base.errors import UserError
from rallypoint.base.log import get_logger
from rallypoint.etcd.api import EtcdError, EtcdRefused, EtcdUnreachable
from rallypoint.protocol.errors import RendezvousConnectionError, RendezvousError, RendezvousStateError
from rallypoint.protocol.messages import Deliver, Link
from rallypoint.rendezvous.backend import RendezvousBackend
from rallypoint.rendezvous.backends.etcd_options import credentials_of, endpoints_of, tls_of
from rallypoint.rendezvous.backends.options import rank_hint, settings_of, worker_stores
from rallypoint.rendezvous.control_plane import ControlPlane, own_node
from rallypoint.rendezvous.elastic import ElasticHandler
from rallypoint.rendezvous.handler import RendezvousHandler
from rallypoint.rendezvous.params import RendezvousParameters
from rallypoint.rendezvous.shared_state import SharedStateLink

if TYPE_CHECKING:
    from rallypoint.rendezvous.backends.etcd_v2_http import EtcdV2Client, LongPoll, V2Read

log = get_logger(__name__)

DEFAULT_PREFIX = "/torch/elastic/rendezvous"
DEFAULT_TTL = 7200
"""Seconds after the last write for which etcd keeps a state."""

_RETRY_PAUSE = 1.0
"""Seconds between two attempts to reach an etcd that has not answered yet."""
_TELL_FIRST, _TELL_EVERY = 2.0, 60.0
"""Seconds until a line says that etcd does not answer, if no attempt has failed until then, and between later lines."""


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The handler for `etcd-v2` parameters. Nothing is opened before the first join.

    Raises:
        UserError: an option or the endpoint cannot work.
    """
    return ElasticHandler(params.backend, _StateInEtcd(client_of(params), params), worker_stores(params))


def client_of(params: RendezvousParameters) -> EtcdV2Client:
    """A client of the etcd that `params` name; nothing is opened yet.

    Raises:
        UserError: an option or the endpoint cannot work.
    """
    from rallypoint.rendezvous.backends.etcd_v2_http import EtcdV2Client

    settings = settings_of(params, counts_heartbeats=True)
    read_timeout = params.get_as_int("read_timeout", 60) or 60
    # A longer silence of etcd than of a node could not be told from the node's own.
    timeout = float(min(read_timeout, settings.heartbeat_timeout))
    return EtcdV2Client(endpoints_of(params.endpoint), tls_of(params), credentials_of(params), timeout)


class EtcdV2Backend(RendezvousBackend):
    """The state in one key; the token is the index of its last change.

    One thread uses it, except for `wait_for_change`, which another one calls, and `cancel_waits` and `close`, which any
    thread may call.
    """

    def __init__(
        self,
        client: EtcdV2Client,
        run_id: str,
        key_prefix: str = DEFAULT_PREFIX,
        ttl: int = DEFAULT_TTL,
        deadline: Deadline | None = None,
    ) -> None:
        """Nothing is opened yet.

        Args:
            client: the client of etcd; used only by this backend from now on.
            run_id: the job's id.
            key_prefix: the prefix of the key.
            ttl: seconds after the last write for which etcd keeps the state.
            deadline: until when to wait for an etcd that has never answered; None for not at all.

        Raises:
            UserError: an empty run id, or a life that is not positive.
        """
        if not run_id:
            raise UserError("the run id must not be empty; a rendezvous in etcd needs it for its key (--rdzv-id)")
        if ttl <= 0:
            raise UserError(f"a state that etcd keeps for {ttl} s cannot be; give 1 s or more")
        self._client = client
        self._key = f"{key_prefix.rstrip('/')}/{run_id}"
        self._ttl = ttl
        self._deadline = deadline
        self._hurry = threading.Event()
        self._begun = threading.Event()
        self._modified = 0
        self._index: int | None = None
        self._warned = 0
        self._poll: LongPoll | None = None
        self._polls = threading.Lock()

    @property
    def name(self) -> str:
        """What messages call it."""
        return "etcd-v2"

    def get_state(self) -> tuple[bytes, int] | None:
        """See `RendezvousBackend.get_state`.

        Raises:
            RendezvousConnectionError: etcd cannot be reached. RendezvousStateError: the value is not a state, or the
                state is gone. RendezvousError: etcd denies access, or does not have the v2 API.
        """
        found = self._first_read() if self._index is None else self._read()
        if self._index_went_back(found):
            found = self._read(quorum=True)  # a member may lag behind; the cluster does not
        if self._index_went_back(found):
            raise self._on_deleted(found)
        return self._on_read(found)

    def set_state(self, state: bytes, token: object = None) -> tuple[bytes, int, bool] | None:
        """See `RendezvousBackend.set_state`; raises what `get_state` does."""
        if token is not None and not (isinstance(token, int) and token > 0):
            there = self.get_state()
            return None if there is None else (*there, False)
        text = base64.b64encode(state).decode()
        try:
            written = self._client.put(self._key, text, ttl=self._ttl, if_index=token, if_new=token is None)
        except EtcdError as error:
            raise _error(error) from error
        if written.node is not None:
            self._modified = written.node.modified
            self._index = max(self._index or 0, self._modified)
            return state, self._modified, True
        if token is not None and not written.there:
            raise self._on_deleted()
        found = self._read(quorum=True)
        if self._index_went_back(found):
            raise self._on_deleted(found)
        now = self._on_read(found)
        if now is None:
            return None
        # An answer may have been lost on the way: then the refusal came from our own state.
        return (*now, written.sent_again and now[0] == state)

    def wait_for_change(self, timeout: float) -> bool:
        """Wait until the key has changed since it was last read or written here; returns whether it has."""
        index = self._index
        if index is None:  # nothing was read yet, and the next read will see the present value
            self._begun.wait(timeout)
            return False
        index = max(index, self._warned)
        poll = self._open_poll()
        try:
            changed = poll.changed(self._key, index, timeout)
        except EtcdError as error:
            log.debug("no changes of the rendezvous state are told: %s", error)
            self._hurry.wait(timeout)
            return False
        if changed is None:
            return False
        self._warned = changed
        return changed > (self._index or 0)

    def cancel_waits(self) -> None:
        """End all waits, and give up an etcd that has never answered."""
        self._hurry.set()
        self._begun.set()
        with self._polls:
            if self._poll is not None:
                self._poll.stop()

    def close(self) -> None:
        """Disconnect, once it is no longer used."""
        self.cancel_waits()
        self._client.close()
        if self._poll is not None:
            self._poll.close()

    # Inside

    def _first_read(self) -> V2Read:
        """Like `_read`, but waits until the deadline for an etcd that does not answer yet, or has no quorum."""
        told_at: float | None = None
        slow = threading.Timer(_TELL_FIRST, self._warn_of_silence)
        slow.daemon = True
        slow.start()
        while True:
            try:
                return self._read(quorum=True)
            except RendezvousConnectionError as error:
                deadline = self._deadline
                if deadline is None or self._hurry.is_set():
                    raise
                now = deadline.clock.monotonic()
                if deadline.expired:
                    # Not as a retryable error: there is no time left for that.
                    raise RendezvousError(f"{error}; it has not answered before the join deadline") from None
                if told_at is None or now - told_at >= _TELL_EVERY:
                    told_at = now
                    log.warning("%s; trying again for another %.0f s", error, deadline.remaining())
                self._hurry.wait(min(_RETRY_PAUSE, deadline.remaining()))
            finally:
                slow.cancel()

    def _warn_of_silence(self) -> None:
        log.warning("no etcd has answered at %s yet; check --rdzv-endpoint", self._client.endpoint)

    def _read(self, *, quorum: bool = False) -> V2Read:
        try:
            return self._client.get(self._key, quorum=quorum)
        except EtcdError as error:
            raise _error(error) from error

    def _index_went_back(self, found: V2Read) -> bool:
        return (0 if found.node is None else found.node.modified) < self._modified

    def _on_deleted(self, found: V2Read | None = None) -> RendezvousStateError:
        there = found is not None and found.node is not None
        how = "is older than it was: etcd has lost the last writes" if there else "is gone"
        return RendezvousStateError(
            f"the rendezvous state in etcd's key {self._key!r} {how}; start the job again with another --rdzv-id"
        )

    def _on_read(self, found: V2Read) -> tuple[bytes, int] | None:
        self._index = max(self._index or 0, found.as_of)
        self._begun.set()
        node = found.node
        if node is None:
            return None
        self._modified = node.modified
        if node.value is None:
            raise RendezvousStateError(
                f"etcd's key {self._key!r} is a directory and no rendezvous state; use another etcd_prefix or --rdzv-id"
            )
        try:
            return base64.b64decode(node.value, validate=True), node.modified
        except (binascii.Error, ValueError):
            raise RendezvousStateError(
                f"etcd's key {self._key!r} holds {node.value[:24]!r}, which is not a rendezvous state; "
                "use another etcd_prefix or --rdzv-id"
            ) from None

    def _open_poll(self) -> LongPoll:
        with self._polls:
            if self._poll is None:
                self._poll = self._client.long_poll()
                if self._hurry.is_set():
                    self._poll.stop()
            return self._poll


def _error(error: EtcdError) -> RendezvousError:
    """Only what may get better by trying again is a connection error here."""
    if isinstance(error, EtcdUnreachable):
        return RendezvousConnectionError(str(error))
    assert isinstance(error, EtcdRefused)
    return RendezvousError(str(error))


class _StateInEtcd(ControlPlane):
    """Where the state is, and this node's link to it."""

    def __init__(self, client: EtcdV2Client, params: RendezvousParameters) -> None:
        settings, where = settings_of(params, counts_heartbeats=True), f"on etcd at {params.endpoint}"
        super().__init__(settings, where, params.endpoint_flag, rank_hint(params))
        self._client = client
        self._backend: EtcdV2Backend | None = None
        self._prefix = str(params.get("etcd_prefix", DEFAULT_PREFIX))
        self._local_addr = params.local_addr
        if not params.run_id:
            raise UserError("a rendezvous in etcd needs a run id for its key; give --rdzv-id")

    def open(self, deliver: Deliver, deadline: Deadline) -> Link:
        """Begin; etcd is asked by the link's own thread."""
        self._backend = backend = EtcdV2Backend(self._client, self.settings.run_id, self._prefix, deadline=deadline)
        address = self._local_addr or own_address(self._client.endpoint)
        node = own_node(address)
        return SharedStateLink(backend, self.settings, node, address, deliver)

    def close(self) -> None:
        """Disconnect."""
        if self._backend is not None:
            self._backend.close()
