"""The client for other packages: synchronous, for any thread.

The connections are on the process's loop thread; the caller waits for the answer, with a deadline. Changes are reported
on a thread of the client, which begins with the first watch. `cluster` says what may be sent again.
"""

from __future__ import annotations

import concurrent.futures
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from rallypoint.base.errors import UserError
from rallypoint.base.log import get_logger
from rallypoint.base.loop import LoopThread, shared_loop
from rallypoint.etcd import messages
from rallypoint.etcd.api import (
    Compare,
    Credentials,
    EtcdLeaseGone,
    EtcdRefused,
    EtcdTls,
    EtcdUnreachable,
    Operation,
    Range,
    RangeResult,
    TxnResult,
    WatchEnd,
    WatchEvent,
)
from rallypoint.etcd.preconditions import load_tls, require_grpc
from rallypoint.etcd.protobuf import DecodingError
from rallypoint.etcd.watch import CallbackThread, Watch

if TYPE_CHECKING:
    from rallypoint.base.endpoint import Endpoint
    from rallypoint.etcd.cluster import Cluster, ClusterResponse


T = TypeVar("T")

log = get_logger(__name__)

_MARGIN = 5.0
"""Seconds beyond its deadline after which a request that did not end by itself is given up: the loop is stuck."""


class EtcdClient:
    """A cluster of etcd, whichever of its members lives. Connects when it is first asked for something.

    Every request raises `EtcdUnreachable` when its time is over, and `EtcdRefused` where more time would not help.
    Not for the loop's own thread, which would wait for itself.

    Args:
        endpoints: the members; each client begins with one at random, so that many spread over all.
        tls: None for plain connections.
        credentials: None where the cluster knows no users.
        timeout_s: seconds that each request has, over all members together, where it says nothing else.
        loop: the loop on which the connections live; the process's own if not given.

    Raises:
        UserError: there is no endpoint, or a file of `tls` cannot be used.
        EtcdPackageMissing: the package that carries gRPC is not installed.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        tls: EtcdTls | None = None,
        credentials: Credentials | None = None,
        timeout_s: float = 5.0,
        *,
        loop: LoopThread | None = None,
    ) -> None:
        if not endpoints:
            raise UserError("there is no endpoint of etcd; give at least one as host:port")
        require_grpc()
        from rallypoint.etcd.cluster import Cluster

        self._timeout = timeout_s
        self._loop = loop or shared_loop()
        self._cluster: Cluster = Cluster(endpoints, load_tls(tls), credentials)
        self._lock = threading.Lock()
        self._watches: set[Watch] = set()
        self._callback_thread: CallbackThread | None = None
        self._closed = False

    def range(self, key: bytes, *, prefix: bool = False, limit: int = 0, timeout_s: float | None = None) -> RangeResult:
        """What is stored at `key`, or with `prefix` under all keys that begin with it, by name.

        Args:
            key: the key, or with `prefix` what the keys begin with (empty: all keys).
            limit: how many at most; 0 for all.
            timeout_s: seconds for it, None for the client's.
        """
        body = messages.encode_range(key, prefix, limit)
        answer = self._request(messages.RANGE, body, timeout_s, changes=False)
        return _read(messages.decode_range, answer)

    def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        repeatable: bool = False,
        timeout_s: float | None = None,
    ) -> TxnResult:
        """Compare and do, in one step.

        Args:
            compares: all must hold for `then` to be done; else `otherwise` is.
            then: the operations if so.
            otherwise: the operations if not.
            repeatable: send it again, to the next member too, when the answer to it was lost. Safe when having been
                done makes its own comparisons false (see `TxnResult.sent_again`), and when doing it twice is as
                good as once.
            timeout_s: seconds for it, None for the client's.

        Raises:
            EtcdLeaseGone: a `Put` names a lease that is gone. Nothing was done.
        """
        changes = any(not isinstance(operation, Range) for operation in (*then, *otherwise))
        body = messages.encode_txn(compares, then, otherwise)
        answer = self._request(messages.TXN, body, timeout_s, repeatable=repeatable or not changes, changes=changes)
        decode = partial(messages.decode_txn, then=then, otherwise=otherwise)
        return _read(decode, answer)._replace(sent_again=answer.sent_again)

    def lease_grant(self, ttl_s: int, *, timeout_s: float | None = None) -> int:
        """A new lease of `ttl_s` whole seconds (etcd may make it longer); returns its id, which is never 0."""
        from rallypoint.etcd.cluster import LeaseExists

        lease = secrets.randbits(62) + 1  # chosen here, so that asking twice makes only one
        try:
            self._request(messages.GRANT, messages.encode_grant(ttl_s, lease), timeout_s)
        except LeaseExists:
            log.debug("the lease %x was granted by a sending whose answer was lost", lease)
        return lease

    def lease_keep_alive(self, lease: int, *, timeout_s: float | None = None) -> int:
        """Restart the lease's time; returns its seconds, 0 if it is gone."""
        return _read(
            messages.decode_lease, self._request(messages.KEEP_ALIVE, messages.encode_lease(lease), timeout_s)
        )[1]

    def lease_revoke(self, lease: int, *, timeout_s: float | None = None) -> None:
        """End a lease, and delete all keys attached to it. A lease that is gone already is no error."""
        try:
            self._request(messages.REVOKE, messages.encode_lease(lease), timeout_s)
        except EtcdLeaseGone:
            log.debug("the lease %x was gone already", lease)

    def watch(
        self,
        key: bytes,
        from_revision: int,
        on_events: Callable[[Sequence[WatchEvent]], None],
        on_lost: Callable[[WatchEnd], None],
        *,
        prefix: bool = True,
    ) -> Watch:
        """Report each change from `from_revision` on, each once and in order, whatever becomes of single members.

        Callbacks come from one thread of the client's own, one at a time over all its watches; they may use the client.
        While no member can be reached, a watch waits.

        Args:
            key: the key, or with `prefix` what the keys begin with.
            from_revision: the first revision to report: after a `range`, its revision + 1; 0 for from now on, which is
                some moment after this returns.
            on_events: takes all changes of one or more revisions, none of them in part.
            on_lost: the watch is over, and why; nothing comes after it.
        """
        with self._lock:
            self._check_open()
            if self._callback_thread is None:
                self._callback_thread = CallbackThread()
            watch = Watch(self._callback_thread, on_events, on_lost, self._forget)
            self._watches.add(watch)
        watch.begin(self._loop, self._cluster, key, prefix, from_revision)
        return watch

    def close(self) -> None:
        """End all watches and connections; what others still ask for fails. Idempotent.

        Waits for a callback that runs, unless it is called from one: hold no lock that a callback takes.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            watches = list(self._watches)
            callbacks = self._callback_thread
        for watch in watches:
            watch.close()
        self._loop.submit(self._close_on_loop()).result(_MARGIN)
        if callbacks is not None:
            callbacks.stop()

    async def _close_on_loop(self) -> None:
        self._cluster.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EtcdUnreachable("this client of etcd is closed")

    def _request(
        self,
        method: messages.Method,
        body: bytes,
        timeout_s: float | None,
        *,
        repeatable: bool = True,
        changes: bool = True,
    ) -> ClusterResponse:
        from rallypoint.etcd.cluster import ClusterRequest

        self._check_open()
        limit = self._timeout if timeout_s is None else timeout_s
        asked = self._loop.submit(self._cluster.ask(ClusterRequest(method, body, repeatable, changes), limit))
        try:
            return asked.result(limit + _MARGIN)
        except concurrent.futures.CancelledError:
            raise EtcdUnreachable("this client of etcd was closed meanwhile", changes) from None
        except concurrent.futures.TimeoutError:
            raise EtcdUnreachable("the event loop of this process is stuck", changes) from None
        finally:
            asked.cancel()  # an exception from a signal handler, say: the result is no longer awaited

    def _forget(self, watch: Watch) -> None:
        with self._lock:
            self._watches.discard(watch)


def _read(decode: Callable[[bytes], T], answer: ClusterResponse) -> T:
    try:
        return decode(answer.body)
    except DecodingError as error:
        raise EtcdRefused(f"etcd's answer is not a message of etcd ({error}); check the endpoints") from None
