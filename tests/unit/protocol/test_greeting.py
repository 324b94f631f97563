"""A peer that only greets needs the same proofs as a node, except for the name of a job."""

from __future__ import annotations

import pytest

from rallypoint.control.membership.state import NodeId, Settings
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.handshake import (
    Challenge,
    ClientHandshake,
    HandshakeRefused,
    Hello,
    Proof,
    ServerHandshake,
)

KEY = b"k" * 32


def hello(job: str, key: bytes | None = None, *, only_greets: bool = True) -> Hello:
    made = ClientHandshake(job, key, b"n" * 16, Settings(job, 1, 1), only_greets=only_greets)
    return codec.decode(codec.encode(made.hello("10.0.0.1", NodeId("10.0.0.1", 7, 0))), Hello)


@pytest.mark.parametrize(
    ("serves", "job", "words"),
    [
        ("mine", "mine", ""),
        ("mine", "", ""),
        (None, "new", ""),
        (None, "", ""),
        ("mine", "other", "belongs to job 'mine'"),
    ],
)
def test_it_may_name_no_job_and_not_another(serves: str | None, job: str, words: str) -> None:
    answer = ServerHandshake(serves, None, b"s" * 16).hello(hello(job))
    if words:
        assert isinstance(answer, HandshakeRefused)
        assert words in answer.sentence
    else:
        assert answer is None, "it is accepted"


def test_a_node_has_to_name_its_job() -> None:
    assert isinstance(ServerHandshake("mine", None, b"").hello(hello("", only_greets=False)), HandshakeRefused)


def test_it_has_to_prove_that_it_holds_the_secret() -> None:
    server = ServerHandshake("mine", lambda job: (KEY,), b"s" * 16)
    assert isinstance(server.hello(hello("mine")), HandshakeRefused)
    assert isinstance(server.hello(hello("mine", KEY)), Challenge)
    assert isinstance(server.proof(Proof(b"guessed"), b"transcript"), HandshakeRefused)
    assert server.signers is None
