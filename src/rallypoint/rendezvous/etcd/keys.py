"""What a job keeps in etcd: names of keys, and what stands under them. Pure.

    PREFIX/JOB/nodes/LEASE    one for each agent, for as long as its lease lives; the oldest of them is the arbiter's
    PREFIX/JOB/arbiter        where the arbiter listens; lives with the arbiter's lease
    PREFIX/JOB/state          what the arbiter knows; outlives it
    PREFIX/JOB/store/...      the agents' store, for those who want one

Everything but the state is JSON, for people with `etcdctl`.
"""

from __future__ import annotations

import json
from typing import Annotated, NamedTuple, TypedDict
from urllib.parse import quote

import msgspec

from rallypoint.base.errors import UserError
from rallypoint.base.log import printable
from rallypoint.rendezvous.errors import RendezvousStateError
from rallypoint.rendezvous.state import NodeId

_STATE = b"rallypoint-etcd-1 "
_NAME = 32
"""Characters that the name of an arbiter may have."""
_NUMBERS = range(1 << 63)
"""Which a kept state may have."""

_Small = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_Lease = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _NodeValue(TypedDict):
    name: tuple[str, _Small, _Small]
    host: str


class _PostValue(TypedDict):
    addresses: list[str]
    port: _Port
    lease: _Lease
    secret: str


_node = msgspec.json.Decoder(_NodeValue)
_post = msgspec.json.Decoder(_PostValue)


class Keys(NamedTuple):
    """The keys of one job."""

    root: str

    @classmethod
    def of(cls, prefix: str, run_id: str) -> Keys:
        """The keys of the job `run_id` under `prefix`, which may begin and end with any number of slashes.

        Raises:
            UserError: the prefix is no text.
        """
        try:
            prefix.encode()
        except UnicodeEncodeError:
            raise UserError(f"rendezvous option prefix={prefix!r} is no text in UTF-8; choose another") from None
        job = quote(run_id, safe="", errors="surrogatepass")  # ids may be any bytes, as with every backend
        return cls(f"{'/' + prefix.strip('/') if prefix.strip('/') else ''}/{job}/")

    @property
    def nodes(self) -> bytes:
        """What the keys of all agents begin with."""
        return f"{self.root}nodes/".encode()

    def node(self, lease: int) -> bytes:
        """The key of the agent that holds this lease."""
        return self.nodes + f"{lease:016x}".encode()

    @property
    def arbiter(self) -> bytes:
        """The key that says where the arbiter is."""
        return f"{self.root}arbiter".encode()

    @property
    def state(self) -> bytes:
        """The key of what the arbiter knows."""
        return f"{self.root}state".encode()

    @property
    def store(self) -> bytes:
        """What the keys of the agents' store begin with."""
        return f"{self.root}store/".encode()


class Post(NamedTuple):
    """Where the arbiter is: addresses of its machine, the likeliest first; whose lease it is; and the job's secret."""

    addresses: tuple[str, ...]
    port: int
    lease: int
    secret: str


class Kept(NamedTuple):
    """What an arbiter keeps: the name that it goes by, how often it was written, and the encoded state."""

    incarnation: str
    number: int
    state: bytes


def encode_node(name: NodeId) -> bytes:
    """What stands under an agent's key."""
    return json.dumps({"name": name[:3], "host": name.host}).encode()


def decode_node(value: bytes) -> NodeId | None:
    """The name of the agent that wrote this; None if it is not one of ours."""
    try:
        found = _node.decode(value)
    except (ValueError, RecursionError):
        return None
    addr, pid, local_id = found["name"]
    return NodeId(printable(addr), pid, local_id, printable(found["host"]))


def encode_post(post: Post) -> bytes:
    """What stands under the arbiter's key."""
    return json.dumps(post._asdict()).encode()


def decode_post(value: bytes) -> Post | None:
    """Where the arbiter is; None if an arbiter of ours did not write this."""
    try:
        found = _post.decode(value)
    except (ValueError, RecursionError):
        return None
    post = Post(tuple(map(printable, found["addresses"])), found["port"], found["lease"], found["secret"])
    return post if post.addresses else None


def encode_kept(kept: Kept) -> bytes:
    """What stands under the state's key."""
    return _STATE + f"{kept.incarnation} {kept.number} ".encode() + kept.state


def decode_kept(key: bytes, value: bytes) -> Kept:
    """What an arbiter has kept.

    Raises:
        RendezvousStateError: this was not written by an arbiter of this version.
    """
    try:
        header, incarnation, number, state = value.split(b" ", 3)
        kept = Kept(incarnation.decode("ascii"), int(number), state)
    except ValueError:
        header, kept = b"", Kept("", 0, b"")
    if header + b" " != _STATE or not 0 < len(kept.incarnation) <= _NAME or kept.number not in _NUMBERS:
        raise RendezvousStateError(
            f"the key {key.decode(errors='replace')!r} in etcd holds {value[:24]!r}, which this version of Rallypoint "
            "did not write; use the same version on all nodes, or another --rdzv-id or prefix (--rdzv-conf prefix=...)"
        )
    return kept
