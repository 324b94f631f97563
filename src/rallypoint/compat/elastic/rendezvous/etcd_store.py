"""In the place of `torch.distributed.elastic.rendezvous.etcd_store`."""

from __future__ import annotations

import base64
import binascii
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from rallypoint.base.clock import Deadline
from rallypoint.base.endpoint import Endpoint
from rallypoint.base.errors import UserError
from rallypoint.etcd.api import Credentials, EtcdError, EtcdTls
from rallypoint.rendezvous.backends.etcd_options import DEFAULT_PORT
from rallypoint.rendezvous.backends.etcd_v2_http import EtcdV2Client, LongPoll, V2Read
from rallypoint.store.api import DEFAULT_TIMEOUT, ReplacingStore, key_bytes, key_text, seconds, value_bytes
from rallypoint.store.errors import StoreConnectionError, StoreTimeoutError

__all__ = ["EtcdStore"]

_MOST_DELAY = 0.1
"""Seconds to wait at most before a change that lost a race is tried again."""


class EtcdKeyTimeoutError(StoreTimeoutError, LookupError):
    """A key did not come in time. Also a LookupError, as torch's is."""


def given_client(client: Any) -> EtcdV2Client:
    """A client of Rallypoint's own for the etcd that `client` is of, which may be python-etcd's.

    Args:
        client: Rallypoint's own, or any object with python-etcd's `base_uri`, and where it needs them its `username`,
            `password`, and the certificates in its connection pool.

    Raises:
        UserError: it does not say where its etcd is.
    """
    if isinstance(client, EtcdV2Client):
        return client.clone()
    place = urlsplit(str(getattr(client, "base_uri", "")))
    if not place.hostname:
        raise UserError(f"{client!r} does not say where its etcd is; give what `EtcdServer.get_client` returns")
    files = getattr(getattr(client, "http", None), "connection_pool_kw", {})
    tls = EtcdTls(files.get("ca_certs"), files.get("cert_file"), files.get("key_file"))
    user = getattr(client, "username", None)
    return EtcdV2Client(
        [Endpoint(place.hostname, place.port or DEFAULT_PORT)],
        tls if place.scheme == "https" else None,
        Credentials(user, getattr(client, "password", None) or "") if user else None,
        float(getattr(client, "read_timeout", None) or 60),
    )


class EtcdStore(ReplacingStore):
    """A store in a directory of an etcd with the v2 API. Keys and values stand there in base64 (contract section 4.10).

    Beyond torch's it can compare and set, append, delete and list. Nothing removes its keys by itself.

    Args:
        etcd_client: of the etcd, such as `EtcdServer.get_client` gives.
        etcd_store_prefix: the directory.
        timeout: how long `get` and `wait` wait; 300 s where it is not given.
    """

    def __init__(self, etcd_client: Any, etcd_store_prefix: str, timeout: timedelta | float | None = None) -> None:
        super().__init__(DEFAULT_TIMEOUT if timeout is None else timeout)
        self.client = etcd_client
        self.prefix = etcd_store_prefix if etcd_store_prefix.endswith("/") else f"{etcd_store_prefix}/"
        self._client: EtcdV2Client = given_client(etcd_client)
        self._lock = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        with self._asking() as client:
            client.put(self._path(key), _text(value_bytes(value)), repeatable=True)

    def get(self, key: str) -> bytes:
        """See `Store.get`; raises a LookupError too where the key does not come in time."""
        return self._await(key, Deadline.after(self._timeout))

    def add(self, key: str, num: int) -> int:
        return super().add(key, num)

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._read(key).node is not None for key in keys)

    def wait(
        self,
        keys: Sequence[str],
        timeout: timedelta | float | None = None,
        *,
        override_timeout: timedelta | float | None = None,
    ) -> None:
        """See `Store.wait`; raises a LookupError too where the keys do not come in time.

        Args:
            keys: the keys.
            timeout: how long to wait; the store's own timeout where it is not given.
            override_timeout: the same, by torch's name.
        """
        limit = timeout if override_timeout is None else override_timeout
        deadline = Deadline.after(self._timeout if limit is None else seconds(limit))
        for key in keys:
            self._await(key, deadline)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        deadline = Deadline.after(self._timeout)
        return [self._await(key, deadline) for key in keys]

    def delete_key(self, key: str) -> bool:
        with self._asking() as client:
            return client.delete(self._path(key))

    def list_keys(self) -> list[str]:
        with self._asking() as client:
            found = client.get(self.prefix)
        names = [node.key.rpartition("/")[2] for node in (found.node.children if found.node else ())]
        return [key_text(_bytes(name.replace("_", "/"))) for name in names]

    def clone(self) -> EtcdStore:
        return EtcdStore(self.client, self.prefix, self._timeout)

    def has_extended_api(self) -> bool:
        """No: what is more than one key is done one by one."""
        return False

    def _where(self) -> str:
        return f"the store in etcd under {self.prefix}"

    def close(self) -> None:
        """Close the connection. The store can still be used."""
        self._client.close()

    def _path(self, key: str) -> str:
        if not key:
            raise UserError("a store in etcd cannot have an empty key; give the key a name")
        # Base64 has a slash, which would be a directory here. Torch's keys have none, as far as they can be read again.
        return self.prefix + _text(key_bytes(key)).replace("/", "_")

    @contextmanager
    def _asking(self) -> Iterator[EtcdV2Client]:
        try:
            with self._lock:
                yield self._client
        except EtcdError as error:
            raise StoreConnectionError(f"the store in etcd cannot be used: {error}") from error

    def _read(self, key: str, *, quorum: bool = False) -> V2Read:
        with self._asking() as client:
            return client.get(self._path(key), quorum=quorum)

    def _change(self, key: str, choose: Callable[[bytes | None], bytes | None]) -> bytes | None:
        deadline = Deadline.after(self._timeout)
        while True:
            node = self._read(key, quorum=True).node
            present = None if node is None else _bytes(node.value or "")
            new = choose(present)
            if new is None:
                return present
            with self._asking() as client:
                index = None if node is None else node.modified
                done = client.put(self._path(key), _text(new), if_index=index, if_new=node is None)
            if done.node is not None:
                return new
            if done.sent_again:
                raise StoreConnectionError(f"whether the key {key!r} was changed is not known: an answer was lost")
            if deadline.expired:
                raise EtcdKeyTimeoutError(f"the key {key!r} was changed by others for {self._timeout:g} s all the time")
            threading.Event().wait(random.uniform(0, _MOST_DELAY))

    def _await(self, key: str, deadline: Deadline) -> bytes:
        found = self._read(key)
        if found.node is not None:
            return _bytes(found.node.value or "")
        with self._asking() as client:
            poll = client.long_poll()
        try:
            return self._watch(poll, key, found.as_of, deadline)
        finally:
            poll.close()

    def _watch(self, poll: LongPoll, key: str, as_of: int, deadline: Deadline) -> bytes:
        while not deadline.expired:
            try:
                poll.changed(self._path(key), as_of, deadline.remaining())
            except EtcdError as error:
                raise StoreConnectionError(f"the store in etcd cannot be used: {error}") from error
            found = self._read(key)
            if found.node is not None:
                return _bytes(found.node.value or "")
            as_of = found.as_of
        raise EtcdKeyTimeoutError(f"the key {key!r} is not in the store in etcd, and did not come in time")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise UserError(
            f"the store in etcd holds {text[:24]!r}, which is not a store's value; use another prefix"
        ) from None
