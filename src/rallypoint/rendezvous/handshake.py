"""How a control connection begins: who is there, is it our protocol, our version, our job, and do we share a secret.

    node                                   server
    magic, Hello(version, job, nonce)  ->
                                       <-  magic, Challenge(nonce, proof)      or Refused(sentence)
    Proof(proof)                       ->
                                       <-  Welcome(node's name, lease, ...)    or Refused(sentence)

Each side proves that it holds the secret by an HMAC over both nonces, the job and its own side, so that a proof serves
for one connection in one direction. Without a secret on either side proofs are empty; a secret on one side only is
refused. Pure: nonces are handed in.

What this does not do: the frames after it are neither encrypted nor signed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rallypoint.base.log import printable
from rallypoint.rendezvous.state import NodeId, Settings

PROTOCOL_VERSION = 4
"""Raised with every change of a message. Two things never change, so that versions can tell each other apart: a `Hello`
begins with the version, and a `Refused` is one sentence."""


class Hello(NamedTuple):
    """A node makes itself known."""

    version: int
    job: str
    nonce: bytes
    address: str
    """Its own address towards the server, as its socket shows it."""
    pid: int
    local_id: int
    has_secret: bool
    settings: Settings
    """What the node asks of the rendezvous. A control plane outside the job takes it from the first node."""
    incarnation: str = ""
    """The arbiter that the node was last in a session with, by its incarnation; empty for a newcomer."""
    host: str = ""
    """The name of the node's machine, for people to read."""


class Challenge(NamedTuple):
    """The server's half of the proof."""

    nonce: bytes
    proof: bytes


class Proof(NamedTuple):
    """The node's half of the proof."""

    proof: bytes


class Welcome(NamedTuple):
    """The session is open: the name that the node goes by, the lease in seconds, and who the arbiter is."""

    node: NodeId
    lease: float
    incarnation: str
    embedded: bool = False
    """Whether the server lives inside an agent of the job, and so may end with a node."""


class Refused(NamedTuple):
    """The connection is of no use; the sentence says why and what to do."""

    sentence: str


class HandshakeError(Exception):
    """The other side is not one of ours, or not of this job. One sentence; trying again does not help."""


def _proof(secret: bytes | None, side: bytes, job: str, client_nonce: bytes, server_nonce: bytes) -> bytes:
    if secret is None:
        return b""
    import hashlib
    import hmac

    parts = (side, job.encode(), client_nonce, server_nonce)
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(secret, message, hashlib.sha256).digest()


def _same(expected: bytes, proof: bytes) -> bool:
    """Whether two proofs are the same, in a time that tells nothing of where they differ."""
    if not expected:  # there is no secret to be guessed
        return not proof
    import hmac

    return hmac.compare_digest(expected, proof)


def objection_to(version: int) -> str:
    """What a node of another version is told, which may greet with other fields than ours."""
    return (
        f"this control plane speaks Rallypoint's protocol {PROTOCOL_VERSION}, the node speaks {version}; "
        "install the same version of rallypoint on all nodes, and where the control plane runs"
    )


@dataclass(slots=True)
class ServerHandshake:
    """The server's side: `hello`, then `proof`; either may refuse. A `job` of None takes nodes of any job."""

    job: str | None
    secret: bytes | None
    nonce: bytes
    greeted: Hello | None = None

    def hello(self, hello: Hello) -> Challenge | Refused:
        """Answer a node's first message."""
        refusal = self._objection(hello)
        if refusal is not None:
            return Refused(refusal)
        self.greeted = hello._replace(address=printable(hello.address), host=printable(hello.host))
        return Challenge(self.nonce, _proof(self.secret, b"server", hello.job, hello.nonce, self.nonce))

    def _objection(self, hello: Hello) -> str | None:
        if hello.version != PROTOCOL_VERSION:
            return objection_to(hello.version)
        if self.job is not None and hello.job != self.job:
            return (
                f"this control plane belongs to job {self.job!r}, not to {hello.job!r}; "
                "give all nodes of a job the same --rdzv-id, and each job an endpoint of its own"
            )
        if self.secret is not None and not hello.has_secret:
            return "this job has a secret; set RALLYPOINT_SECRET on this node as on the others"
        if self.secret is None and hello.has_secret:
            return (
                "this node has a secret and the control plane has none; set RALLYPOINT_SECRET on all nodes or on none"
            )
        return None

    def proof(self, proof: Proof) -> Refused | None:
        """Check a node's proof; None means that it is in."""
        assert self.greeted is not None
        expected = _proof(self.secret, b"node", self.greeted.job, self.greeted.nonce, self.nonce)
        if _same(expected, proof.proof):
            return None
        return Refused("this node's RALLYPOINT_SECRET is not the job's; set the same on all nodes")


@dataclass(slots=True)
class ClientHandshake:
    """The node's side: send `hello`, answer the challenge with `prove`."""

    job: str
    secret: bytes | None
    nonce: bytes

    settings: Settings

    def hello(self, address: str, pid: int, local_id: int, incarnation: str = "", host: str = "") -> Hello:
        """The first message. For `incarnation` and `host` see `Hello`."""
        return Hello(
            PROTOCOL_VERSION,
            self.job,
            self.nonce,
            address,
            pid,
            local_id,
            self.secret is not None,
            self.settings,
            incarnation,
            host,
        )

    def prove(self, challenge: Challenge) -> Proof:
        """The answer to the server's challenge.

        Raises:
            HandshakeError: the server does not hold our secret.
        """
        expected = _proof(self.secret, b"server", self.job, self.nonce, challenge.nonce)
        if not _same(expected, challenge.proof):
            raise HandshakeError(
                "the control plane could not prove that it holds this job's RALLYPOINT_SECRET; "
                "set the same secret on all nodes, and make sure that the endpoint is the job's own"
            )
        return Proof(_proof(self.secret, b"node", self.job, self.nonce, challenge.nonce))
