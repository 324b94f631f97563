"""Requests to etcd, its answers, and errors, as plain data.

    EtcdError                 anything that etcd or the way to it refuses
    ├── EtcdUnreachable       no member answered in time, or none has a leader: trying again later may help
    ├── EtcdRefused           trying again cannot help: password, certificate, permission, another protocol, no space
    ├── EtcdLeaseGone         the lease named in a request has ended or was never granted
    └── EtcdPackageMissing    the package that carries gRPC is not installed

Keys and values are bytes. Revisions are etcd's: one number for the whole cluster, which grows with each change. This
module imports only the standard library.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from rallypoint.base.errors import RallypointError


class EtcdError(RallypointError):
    """The root of the tree above; the message is one sentence."""


class EtcdUnreachable(EtcdError):
    """No member answered in time, or the cluster has no leader. Trying again may help.

    The request may still have been carried out.
    """


class EtcdRefused(EtcdError):
    """Retrying cannot help: a user must change a password, certificate, permission or endpoint."""


class EtcdLeaseGone(EtcdError):
    """The lease named in a request ended or was never granted. Nothing was changed."""


class EtcdPackageMissing(EtcdError):
    """The gRPC package is not installed."""


class Credentials(NamedTuple):
    """A user of etcd's own."""

    user: str
    password: str

    def __repr__(self) -> str:
        return f"Credentials(user={self.user!r}, password=...)"


class EtcdTls(NamedTuple):
    """PEM files for a TLS connection.

    `cacert`: the trusted authorities, None for the system's. `cert` and `key`: our own certificate and its key; without
    `key`, `cert` contains both.
    """

    cacert: str | None = None
    cert: str | None = None
    key: str | None = None


class KeyValue(NamedTuple):
    """A stored key. For a deleted key, only `key` and `mod_revision` (of the deletion) are valid.

    `version` counts the changes since the key was created: 1 at its creation. `lease` is 0 without one.
    """

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int


class Compare(NamedTuple):
    """A condition of a transaction: `Compare(key, "mod_revision", "==", 17)`.

    A missing key has no value and 0 for all its numbers: comparisons with its value fail. With `prefix`, all keys that
    begin with it must satisfy the condition; without any, the condition applies as to a missing key.
    """

    key: bytes
    field: Literal["create_revision", "mod_revision", "version", "value", "lease"]
    relation: Literal["==", "!=", "<", ">"]
    operand: int | bytes
    prefix: bool = False


class Put(NamedTuple):
    """Store a value; with a lease, only as long as that lives."""

    key: bytes
    value: bytes
    lease: int = 0


class Delete(NamedTuple):
    """Delete a key, or with `prefix` all keys that begin with it."""

    key: bytes
    prefix: bool = False


class Range(NamedTuple):
    """Read a key, or with `prefix` all keys that begin with it, by name; `limit` 0 means all of them."""

    key: bytes
    prefix: bool = False
    limit: int = 0


Operation: TypeAlias = Put | Delete | Range


class RangeResult(NamedTuple):
    """The answer to a `Range`: the cluster's revision, and the keys by name."""

    revision: int
    kvs: tuple[KeyValue, ...]


class TxnResult(NamedTuple):
    """The answer to a transaction.

    `succeeded`: all comparisons were true, so `then` was carried out instead of `otherwise`. False may be the effect of
    an earlier send of the same transaction, which only the stored data shows. `revision`: the cluster's afterwards.
    `ranges`: the result of each `Range`, in order.
    """

    succeeded: bool
    revision: int
    ranges: tuple[RangeResult, ...]


class WatchEvent(NamedTuple):
    """One change of one key."""

    kind: Literal["put", "delete"]
    kv: KeyValue


class WatchCompacted(NamedTuple):
    """A watch ended: unreported changes before `revision` are lost. Read everything, and watch again."""

    revision: int


class WatchCancelled(NamedTuple):
    """A watch ended because etcd will not continue it, for example after losing a permission. The sentence says why."""

    reason: str


WatchEnd: TypeAlias = WatchCompacted | WatchCancelled
