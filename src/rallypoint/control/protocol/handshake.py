"""The handshake of a control connection: checks the peer's protocol, version, job and key.

    node                                            server
    magic, Hello(version, job, nonce, ...)  ->
                                            <-  magic, Challenge(nonce)      or Refused(sentence)
    Proof(proof)                            ->
                                            <-  Welcome(lease, ...)        or Refused(sentence)

If the job has a key (`base.secrets`), the node first proves that it has the key, over all bytes of the greeting, and
each frame from the Welcome on is signed (`control.protocol.signing`): the Welcome's signature is the server's proof. So
a dialing peer learns nothing that it could use to try keys. If neither side has a key, nothing is proved or signed, and
the Welcome answers the Hello; a key on only one side is refused. A Refused is never signed, since the two sides might
not share a key: an attacker who can change the traffic can keep a node out, but nothing more. Pure: the caller passes
the nonces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from rallypoint.control.membership.state import NodeId, Settings

if TYPE_CHECKING:
    from rallypoint.control.protocol.signing import Signers

Keys: TypeAlias = Callable[[str], tuple[bytes, ...]]
"""Keys accepted from a job's nodes, by the job's id."""

PROTOCOL_VERSION = 24
"""Increment this with every change to a message. Two things never change, so that versions can recognize each other: a
`Hello` begins with the version, and a `HandshakeRefused` is one sentence."""


class Hello(NamedTuple):
    """The greeting of a node."""

    version: int
    job: str
    nonce: bytes
    address: str
    """Its own address on the way to the server, from its socket."""
    node: NodeId
    """The node's identity, the same in all its sessions with any coordinator."""
    has_secret: bool
    settings: Settings
    """The node's settings of the rendezvous. A control plane outside the job adopts those of the first node."""
    incarnation: str = ""
    """Incarnation of the coordinator in the node's last session; empty for a new node."""
    is_watcher: bool = False
    """Whether this is a watcher's session (`observation`), never a node's. Its `job` may be empty, for the only job or
    the list of all.
    """
    only_greets: bool = False
    """Whether to send only the welcome, which shows that this node would be accepted, and the time of day. Opens no
    session, even if the job does not exist yet."""
    process: bytes = b""
    """Name of the node's process (`base.own_process`), which a server in the same process recognizes."""


class Challenge(NamedTuple):
    """The server's nonce, which with the node's makes each greeting unique."""

    nonce: bytes


class Proof(NamedTuple):
    """The proof that the node has the job's key."""

    proof: bytes


class Welcome(NamedTuple):
    """The session is open: the lease in seconds, and the identity of the coordinator."""

    lease: float
    incarnation: str
    embedded: bool = False
    """Whether the server runs inside an agent of the job, and so might end with a node."""
    heartbeat_interval: float = 0.0
    """Seconds from one heartbeat of the node to the next; 0 for a third of the lease."""
    timestamp: float = 0.0
    """The server's clock, in seconds since 1970, for a node that only greets. No decision depends on it."""


class HandshakeRefused(NamedTuple):
    """The connection is refused; the sentence says why and what to do."""

    sentence: str


class HandshakeError(Exception):
    """The peer is not one of ours, or belongs to another job. One sentence; retrying does not help."""


def version_error(version: int) -> str:
    """The error for a node of another version, whose greeting may have other fields."""
    return (
        f"this control plane uses protocol version {PROTOCOL_VERSION}, but the node uses {version}; install the same "
        "version of rallypoint on all nodes and on the host of the control plane"
    )


@dataclass(slots=True)
class ServerHandshake:
    """The server's side: `hello`, then `proof` if there are keys; either may refuse. With a `job` of None, nodes of any
    job are accepted.
    """

    job: str | None
    keys: Keys | None
    nonce: bytes
    greeted: Hello | None = None
    signers: Signers | None = None
    """After the proof: signs all further frames; None if the job has no key."""

    def hello(self, hello: Hello) -> Challenge | HandshakeRefused | None:
        """Answer a node's first message; None accepts the node without a proof."""
        refusal = self._refusal_reason(hello)
        if refusal is not None:
            return HandshakeRefused(refusal)
        self.greeted = hello
        return None if self.keys is None else Challenge(self.nonce)

    def _refusal_reason(self, hello: Hello) -> str | None:
        if hello.version != PROTOCOL_VERSION:
            return version_error(hello.version)
        if hello.node.is_placeholder:
            return "this node did not identify itself; install the same version of rallypoint on all nodes"
        names_job = bool(hello.job) or not (hello.is_watcher or hello.only_greets)
        if self.job is not None and names_job and hello.job != self.job:
            return (
                f"this control plane belongs to job {self.job!r}, not to {hello.job!r}; use the same --rdzv-id on all "
                "nodes of a job, and a separate endpoint for each job"
            )
        if self.keys is not None and not hello.has_secret:
            return "this job has a secret; set RALLYPOINT_SECRET on this node as on the others"
        if self.keys is None and hello.has_secret:
            return (
                "this node has a secret, but the control plane has none; set RALLYPOINT_SECRET on all nodes or on none"
            )
        return None

    def proof(self, proof: Proof, transcript: bytes) -> HandshakeRefused | None:
        """Check a node's proof; None accepts the node.

        Args:
            proof: the node's proof.
            transcript: the transcript of the greeting (`control.protocol.signing.transcript_of`).
        """
        assert self.greeted is not None
        assert self.keys is not None, "it was challenged"
        from rallypoint.control.protocol.signing import Signers, proven_key

        key = proven_key(self.keys(self.greeted.job), transcript, proof.proof)
        if key is None:
            return HandshakeRefused(
                "this node's RALLYPOINT_SECRET is not the job's secret; set the same secret on all nodes"
            )
        self.signers = Signers(key, transcript, node=False)
        return None


@dataclass(slots=True)
class ClientHandshake:
    """The node's side: send `hello` and, with a key, answer the challenge with `prove`."""

    job: str
    key: bytes | None
    nonce: bytes
    settings: Settings
    is_watcher: bool = False
    only_greets: bool = False
    signers: Signers | None = None
    """After `prove`: signs all further frames; None if the job has no key."""

    def hello(self, address: str, node: NodeId, incarnation: str = "", process: bytes = b"") -> Hello:
        """The first message; see `Hello`."""
        return Hello(
            version=PROTOCOL_VERSION,
            job=self.job,
            nonce=self.nonce,
            address=address,
            node=node,
            has_secret=self.key is not None,
            settings=self.settings,
            incarnation=incarnation,
            is_watcher=self.is_watcher,
            only_greets=self.only_greets,
            process=process,
        )

    def prove(self, transcript: bytes) -> Proof:
        """The answer to the server's challenge; see `ServerHandshake.proof` for the transcript."""
        assert self.key is not None, "only who has a key is challenged"
        from rallypoint.control.protocol.signing import Signers, proof

        self.signers = Signers(self.key, transcript, node=True)
        return Proof(proof(self.key, transcript))
