"""A client of etcd with operations that only tests and measurements need: write by one request, delete, compact."""

from __future__ import annotations

from rallypoint.base.endpoint import Endpoint
from rallypoint.control.etcd import messages
from rallypoint.control.etcd.client import EtcdClient, _read
from rallypoint.control.etcd.messages import Fields, Method, number

_PUT = Method("/etcdserverpb.KV/Put")
_DELETE = Method("/etcdserverpb.KV/DeleteRange")
_COMPACT = Method("/etcdserverpb.KV/Compact")


class WritingClient(EtcdClient):
    """See `EtcdClient`."""

    def put(self, key: bytes, value: bytes, lease: int = 0, *, timeout_s: float | None = None) -> int:
        """Store a value; returns the revision that this made.

        Args:
            key: where.
            value: what.
            lease: the lease without which it goes, or 0.
            timeout_s: seconds for it, None for the client's.

        Raises:
            EtcdLeaseGone: the lease is gone. Nothing was done.
        """
        body = messages.encode_put(key, value, lease)
        return _read(_decode_put, self._request(_PUT, body, timeout_s))

    def delete(self, key: bytes, *, prefix: bool = False) -> int:
        """Delete a key, or all that begin with it; returns how many there were (by the sending that was answered).

        Args:
            key: the key, or what the keys begin with.
            prefix: whether it is the latter.
        """
        body = messages.encode_delete(key, prefix)
        return _read(_decode_delete, self._request(_DELETE, body, None))

    def compact(self, revision: int) -> None:
        """Forget what was before `revision`, for the whole cluster. For tests, and for whoever owns the cluster."""
        self._request(_COMPACT, number(1, revision), None)

    @property
    def connected_to(self) -> Endpoint | None:
        """The member in use just now; None if there is none."""
        member = self._cluster._member
        return None if member is None or member.closed else member.endpoint


def _decode_delete(data: bytes) -> int:
    """DeleteRangeResponse: how many keys there were."""
    return Fields(data).number(2)


def _decode_put(data: bytes) -> int:
    """PutResponse: the cluster's revision."""
    return Fields(Fields(data).string(1)).number(3)
