"""Requests to etcd and its answers as plain data, and what can go wrong.

    EtcdError                 anything that etcd or the way to it refuses
    ├── EtcdUnreachable       no member answered in time, or none has a leader: trying again later may help
    ├── EtcdRefused           trying again cannot help: password, certificate, permission, another protocol, no space
    ├── EtcdLeaseGone         the lease named in a request has ended or was never granted
    └── EtcdPackageMissing    the package that carries gRPC is not installed

Keys and values are bytes. Revisions are etcd's: one number for the whole cluster, which each change makes larger.
Nothing here imports more than the standard library.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from rallypoint.base.errors import RallypointError


class EtcdError(RallypointError):
    """Root of the tree above; the message is one sentence."""


class EtcdUnreachable(EtcdError):
    """No member answered in time, or the cluster has no leader. Trying again may help.

    What was asked for may have been done all the same.
    """


class EtcdRefused(EtcdError):
    """Retrying cannot help: a user has to change a password, a certificate, a permission or an endpoint."""


class EtcdLeaseGone(EtcdError):
    """The lease named in a request has ended or was never granted. Nothing was changed."""


class EtcdPackageMissing(EtcdError):
    """The package that carries gRPC is not installed."""


class Credentials(NamedTuple):
    """A user of etcd's own."""

    user: str
    password: str

    def __repr__(self) -> str:
        return f"Credentials(user={self.user!r}, password=...)"


class EtcdTls(NamedTuple):
    """Files for a connection over TLS, in PEM.

    `cacert`: whom to trust, None for the authorities that the system trusts. `cert` and `key`: who we are, both or
    neither; without `key`, the key is in `cert`.
    """

    cacert: str | None = None
    cert: str | None = None
    key: str | None = None


class KeyValue(NamedTuple):
    """A key as it is stored. Of a deleted key only `key` and `mod_revision` (when it was deleted) mean something.

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

    A key that does not exist has 0 for all its numbers, and no value: a comparison with its value does not hold. With
    `prefix` all keys that begin with it must satisfy the condition; if there are none, it is as for one that does not
    exist.
    """

    key: bytes
    field: Literal["create_revision", "mod_revision", "version", "value", "lease"]
    relation: Literal["==", "!=", "<", ">"]
    operand: int | bytes
    prefix: bool = False


class Put(NamedTuple):
    """Store a value; with a lease, only for as long as that lives."""

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
    """The answer to a `Range`: the cluster's revision then, and what was there, by name."""

    revision: int
    kvs: tuple[KeyValue, ...]


class TxnResult(NamedTuple):
    """The answer to a transaction.

    `succeeded`: whether all comparisons held, so that `then` was done, and not `otherwise`; False may be the work of
    its own earlier sending, which only what is stored shows. `revision`: the cluster's after it. `ranges`: what each
    `Range` found, in order.
    """

    succeeded: bool
    revision: int
    ranges: tuple[RangeResult, ...]


class WatchEvent(NamedTuple):
    """One change of one key."""

    kind: Literal["put", "delete"]
    kv: KeyValue


class WatchCompacted(NamedTuple):
    """A watch ended: changes from before `revision` that it has not reported are lost. Read all, and watch again."""

    revision: int


class WatchCancelled(NamedTuple):
    """A watch ended: etcd will not continue with it (a permission was taken away, say). One sentence says why."""

    reason: str


WatchEnd: TypeAlias = WatchCompacted | WatchCancelled
