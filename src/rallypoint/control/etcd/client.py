"""The etcd client for other packages: synchronous, for any thread.

The connections run on the process's loop thread, which also reports changes. A request's caller waits for the answer
until a deadline. Any request might be sent twice (`cluster`).
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from rallypoint.base.errors import UserError
from rallypoint.base.log import get_logger
from rallypoint.base.loop import LoopThread, shared_loop
from rallypoint.control.etcd import messages
from rallypoint.control.etcd.api import (
    Compare,
    Credentials,
    EtcdLeaseGone,
    EtcdPackageMissing,
    EtcdRefused,
    EtcdTls,
    EtcdUnreachable,
    Operation,
    RangeResult,
    TxnResult,
    WatchCancelled,
    WatchEnd,
    WatchEvent,
)
from rallypoint.control.etcd.messages import DecodingError

if TYPE_CHECKING:
    import ssl

    from rallypoint.base.endpoint import Endpoint
    from rallypoint.control.etcd.cluster import EtcdMembers


T = TypeVar("T")

log = get_logger(__name__)

_MARGIN = 5.0
"""Seconds after its deadline at which a request that did not end by itself is given up: the loop is stuck."""


_DIVERGING = frozenset({"3.5.0", "3.5.1", "3.5.2"})


class EtcdClient:
    """An etcd cluster, with any live members. Connects on the first request.

    Every request raises `EtcdUnreachable` after its timeout, and `EtcdRefused` if more time cannot help. Do not use it
    on the loop's own thread, which would wait for itself.

    Args:
        endpoints: the members; each client starts with a random one, so that many clients spread over all members.
        tls: None for plain connections.
        credentials: None if the cluster has no users.
        timeout_s: the default seconds for a request, over all members together.
        idle_s: seconds of a member's silence before a watch checks it; None for about 1.
        loop: the loop of the connections; by default the process's own.

    Raises:
        UserError: there is no endpoint, or a file of `tls` is unusable.
        EtcdPackageMissing: the package that carries gRPC is not installed.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        tls: EtcdTls | None = None,
        credentials: Credentials | None = None,
        timeout_s: float = 5.0,
        *,
        idle_s: float | None = None,
        loop: LoopThread | None = None,
    ) -> None:
        if not endpoints:
            raise UserError("no etcd endpoint is set; set at least one as host:port")
        _require_grpc()
        from rallypoint.control.etcd.cluster import IDLE, EtcdMembers

        self._several = len(endpoints) > 1
        self._timeout = timeout_s
        self._loop = loop or shared_loop()
        self._cluster: EtcdMembers = EtcdMembers(
            endpoints, _load_tls(tls), credentials, IDLE if idle_s is None else idle_s
        )
        self._lock = threading.Lock()
        self._watches: set[EtcdWatch] = set()
        self._closed = False

    @property
    def diverging_version(self) -> str:
        """The version of etcd, if the data of members with that version can diverge; otherwise empty."""
        return self._cluster.version if self._several and self._cluster.version in _DIVERGING else ""

    def range(self, key: bytes, *, prefix: bool = False, limit: int = 0, timeout_s: float | None = None) -> RangeResult:
        """Read `key`, or with `prefix` all keys that begin with it, by name.

        Args:
            key: the key, or with `prefix` the start of the keys (empty: all keys).
            limit: the maximum number of keys; 0 for all.
            timeout_s: seconds for the request, None for the client's.
        """
        body = messages.encode_range(key, prefix, limit)
        return _read(messages.decode_range, self._request(messages.RANGE, body, timeout_s))

    def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        timeout_s: float | None = None,
    ) -> TxnResult:
        """Compare and act in one step; the transaction might be sent twice.

        So its own effect must make its comparisons fail, or repeating it must have no effect.

        Args:
            compares: if all hold, `then` is carried out; otherwise `otherwise` is.
            then: the operations if all hold.
            otherwise: the operations if one fails.
            timeout_s: seconds for the request, None for the client's.

        Raises:
            EtcdLeaseGone: a `Put` names a lease that is gone. Nothing has changed.
        """
        answer = self._request(messages.TXN, messages.encode_txn(compares, then, otherwise), timeout_s)
        return _read(partial(messages.decode_txn, then=then, otherwise=otherwise), answer)

    def lease_grant(self, ttl_s: int, *, timeout_s: float | None = None) -> int:
        """Grant a lease of `ttl_s` whole seconds (etcd may extend it); returns its id, which is never 0."""
        lease = secrets.randbits(62) + 1  # chosen here, so that a repeated request grants only one lease
        self._request(messages.GRANT, messages.encode_grant(ttl_s, lease), timeout_s)
        return lease

    def lease_keep_alive(self, lease: int, *, timeout_s: float | None = None) -> int:
        """Restart the lease's time; returns its seconds, 0 if it is gone."""
        answer = self._request(messages.KEEP_ALIVE, messages.encode_lease(lease), timeout_s)
        return _read(messages.decode_lease, answer)[1]

    def lease_revoke(self, lease: int, *, timeout_s: float | None = None) -> None:
        """End a lease, and delete its keys. A missing lease is no error."""
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
    ) -> EtcdWatch:
        """Report each change from `from_revision` on, once and in order, even if some members fail.

        Callbacks run on the loop's thread: they must not wait or use the client. While no member is reachable, a watch
        waits.

        Args:
            key: the key, or with `prefix` the beginning of the keys.
            from_revision: the first revision to report: after a `range`, its revision + 1; 0 for some time after this
                returns.
            on_events: called with all changes of one or more revisions, each complete.
            on_lost: called last, with the reason why the watch ended.
        """
        watch = EtcdWatch(on_events, on_lost)
        with self._lock:
            self._check_open()
            task = watch.begin(self._loop, self._cluster, key, prefix, from_revision)
            self._watches.add(watch)
        task.add_done_callback(lambda _: self._forget(watch))
        return watch

    def close(self) -> None:
        """End all watches and connections; pending requests fail. Idempotent.

        Waits for a running callback: the caller must not hold a lock that a callback takes.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            watches = list(self._watches)
        for watch in watches:
            watch.close()
        self._loop.submit(self._close_on_loop()).result(_MARGIN)

    async def _close_on_loop(self) -> None:
        self._cluster.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EtcdUnreachable("this etcd client is closed")

    def _request(self, method: messages.Method, body: bytes, timeout_s: float | None) -> bytes:
        self._check_open()
        limit = self._timeout if timeout_s is None else timeout_s
        future = self._loop.submit(self._cluster.ask(method, body, limit))
        try:
            return future.result(limit + _MARGIN)
        except concurrent.futures.CancelledError:
            raise EtcdUnreachable("this etcd client was closed in the meantime") from None
        except concurrent.futures.TimeoutError:
            raise EtcdUnreachable("the event loop of this process is stuck") from None
        finally:
            future.cancel()  # for example, after an exception in a signal handler: nobody awaits the result

    def _forget(self, watch: EtcdWatch) -> None:
        with self._lock:
            self._watches.discard(watch)


def _read(decode: Callable[[bytes], T], answer: bytes) -> T:
    try:
        return decode(answer)
    except DecodingError as error:
        raise EtcdRefused(f"the reply is not an etcd message ({error}); check the endpoints") from None


class EtcdWatch:
    """A watch that runs until it is closed or lost. Created by `EtcdClient.watch`."""

    def __init__(self, on_events: Callable[[Sequence[WatchEvent]], None], on_lost: Callable[[WatchEnd], None]) -> None:
        self._on_events = on_events
        self._on_lost = on_lost
        self._closed = False
        self._task: concurrent.futures.Future[None] | None = None

    def begin(
        self, loop: LoopThread, cluster: EtcdMembers, key: bytes, prefix: bool, from_revision: int
    ) -> concurrent.futures.Future[None]:
        """Follow, on the loop, until the returned future is done. Called once, by the client."""
        self._task = loop.submit(self._follow(cluster, key, prefix, from_revision))
        return self._task

    async def _follow(self, cluster: EtcdMembers, key: bytes, prefix: bool, from_revision: int) -> None:
        lost: WatchEnd
        try:
            lost = await cluster.watch(key, prefix, from_revision, partial(self._report, self._on_events))
        except Exception as error:
            log.exception("an etcd watch failed")
            lost = WatchCancelled(f"the watch failed: {type(error).__name__}: {error}")
        self._report(self._on_lost, lost)

    def _report(self, callback: Callable[[T], None], what: T) -> None:
        if self._closed:
            return
        try:
            callback(what)
        except Exception:
            log.exception("an etcd watch callback failed")

    def close(self) -> None:
        """Start no more callbacks; a running one continues. Idempotent; does not wait."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()


def _require_grpc() -> None:
    """Raise `EtcdPackageMissing` if the gRPC package is not installed. Imports nothing."""
    if importlib.util.find_spec("grpclib") is None:
        raise EtcdPackageMissing("etcd needs the package grpclib, which is not installed; run: pip install grpclib")


def _load_tls(tls: EtcdTls | None) -> ssl.SSLContext | None:
    """Load the files into a context; None for plain connections.

    Raises:
        UserError: a file is unreadable or has other content.
    """
    if tls is None:
        return None
    import ssl

    if tls.key is not None and tls.cert is None:
        raise UserError(f"a key ({tls.key}) is set without a certificate; set `cert` too")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    try:
        if tls.cacert is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(cafile=tls.cacert)
    except OSError as error:  # ssl.SSLError is one
        raise UserError(
            f"`cacert` {tls.cacert} cannot be used ({_file_error(error)}); use a PEM file with CA certificates"
        ) from error
    if tls.cert is not None:
        try:
            context.load_cert_chain(tls.cert, tls.key)
        except OSError as error:
            files = tls.cert if tls.key is None else f"{tls.cert} with `key` {tls.key}"
            raise UserError(
                f"`cert` {files} cannot be used ({_file_error(error)}); use PEM files with a certificate and its own "
                "key"
            ) from error
    return context


def _file_error(error: OSError) -> str:
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return str(reason).lower().replace("_", " ")
