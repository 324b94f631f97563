from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.control.protocol.errors import SignatureError
from rallypoint.control.protocol.messages import SIGNATURE_SIZE
from rallypoint.control.protocol.signing import Signers, proof, proven_key, transcript_of

KEY = os.urandom(32)


def pair(key: bytes = KEY, transcript: bytes = b"greeting") -> tuple[Signers, Signers]:
    return Signers(key, transcript, node=True), Signers(KEY, b"greeting", node=False)


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=200)), max_size=20))
def test_signed_frames_are_verified_in_both_directions(frames: list[tuple[bool, bytes]]) -> None:
    node, coordinator = pair()
    for from_node, payload in frames:
        sender, receiver = (node, coordinator) if from_node else (coordinator, node)
        assert receiver.incoming.verify(sender.outgoing.sign(payload)) == payload


@given(st.binary(max_size=50), st.integers(0, 10**6), st.integers(0, 7))
def test_a_changed_bit_is_detected(payload: bytes, place: int, bit: int) -> None:
    node, coordinator = pair()
    signed = bytearray(node.outgoing.sign(payload))
    signed[place % len(signed)] ^= 1 << bit
    with pytest.raises(SignatureError):
        coordinator.incoming.verify(bytes(signed))


def test_repeated_missing_and_returned_frames_are_detected() -> None:
    node, coordinator = pair()
    first = node.outgoing.sign(b"first")
    assert coordinator.incoming.verify(first) == b"first"
    for wrong in (first, coordinator.outgoing.sign(b"x")):
        with pytest.raises(SignatureError):
            coordinator.incoming.verify(wrong)
    node, coordinator = pair()
    node.outgoing.sign(b"left out")
    with pytest.raises(SignatureError):
        coordinator.incoming.verify(node.outgoing.sign(b"second"))


@pytest.mark.parametrize("data", [b"", b"x" * (SIGNATURE_SIZE - 1), b"x" * SIGNATURE_SIZE])
def test_frames_without_a_signature_are_refused(data: bytes) -> None:
    with pytest.raises(SignatureError):
        pair()[1].incoming.verify(data)


def test_signatures_depend_on_the_key_and_the_greeting() -> None:
    for node in (pair(key=os.urandom(32))[0], pair(transcript=b"another")[0]):
        with pytest.raises(SignatureError):
            pair()[1].incoming.verify(node.outgoing.sign(b"x"))


def test_proofs_depend_on_the_key_and_the_greeting() -> None:
    transcript, old = transcript_of(b"hello", b"challenge"), os.urandom(32)
    given_proof = proof(old, transcript)
    assert proven_key((KEY, old), transcript, given_proof) == old
    assert proven_key((KEY,), transcript, given_proof) is None
    assert proven_key((KEY, old), transcript_of(b"hell", b"ochallenge"), given_proof) is None
    assert proven_key((), transcript, b"") is None
