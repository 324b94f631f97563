"""Signed frames: peers prove that they have the job's key; others cannot add, change, drop, repeat or reorder a frame.

    transcript    all bytes of the greeting: the node's Hello and the coordinator's Challenge, each with its length
    proof         HMAC-SHA256(key, "node proof" + transcript), which the node sends; the side that dials proves first
    session keys  HMAC-SHA256(key, direction + transcript), one for each direction
    signature     BLAKE2b-128, keyed with the direction's key, over the frame's number and its payload

The coordinator proves that it has the key by signing its first frame after the proof. Both nonces are in the
transcript, so keys and signatures are valid for one connection only. Pure; about 2 microseconds a frame.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b, sha256
from hmac import compare_digest
from hmac import digest as hmac_digest

from rallypoint.control.protocol.errors import SignatureError
from rallypoint.control.protocol.messages import SIGNATURE_SIZE

_PROOF, _FROM_NODE, _FROM_COORDINATOR = b"node proof", b"frames of the node", b"frames of the coordinator"


class Signer:
    """Signs the frames of one direction of one connection, in order."""

    def __init__(self, key: bytes) -> None:
        self._hash = blake2b(key=key, digest_size=SIGNATURE_SIZE)
        self._number = 0

    def sign(self, payload: bytes) -> bytes:
        """Sign the payload of the next frame; the signature precedes it."""
        return self._signature(payload) + payload

    def verify(self, signed: bytes) -> bytes:
        """The payload of the next frame.

        Raises:
            SignatureError: the signature does not match this frame.
        """
        payload = signed[SIGNATURE_SIZE:]
        if not compare_digest(self._signature(payload), signed[:SIGNATURE_SIZE]):
            raise SignatureError("a frame is not signed with the key of this session")
        return payload

    def _signature(self, payload: bytes) -> bytes:
        signing = self._hash.copy()  # the key's block is hashed once, not for each frame
        signing.update(self._number.to_bytes(8, "big"))
        signing.update(payload)
        self._number += 1
        return signing.digest()


class Signers:
    """The signers of both directions of one connection, as one side sees them."""

    def __init__(self, key: bytes, transcript: bytes, *, node: bool) -> None:
        """Derive the session's keys.

        Args:
            key: the job's key.
            transcript: the transcript of the greeting, see `transcript_of`.
            node: whether this side is the node.
        """
        from_node = Signer(hmac_digest(key, _FROM_NODE + transcript, sha256))
        from_coordinator = Signer(hmac_digest(key, _FROM_COORDINATOR + transcript, sha256))
        self.outgoing, self.incoming = (from_node, from_coordinator) if node else (from_coordinator, from_node)


def transcript_of(hello: bytes, challenge: bytes) -> bytes:
    """The data that a proof covers: both messages as sent, separated by their lengths."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in (hello, challenge))


def proof(key: bytes, transcript: bytes) -> bytes:
    """The proof that the node has the key: 32 bytes."""
    return hmac_digest(key, _PROOF + transcript, sha256)


def proven_key(keys: Iterable[bytes], transcript: bytes, claimed: bytes) -> bytes | None:
    """The key that was proved; None if it is not in `keys`."""
    return next((key for key in keys if compare_digest(proof(key, transcript), claimed)), None)
