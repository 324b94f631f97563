"""The handshake between a node and one that dials it, so that no other machine with its address is mistaken for it.
Pure.

    rallypoint-mesh 1 NONCE                      the dialler
    rallypoint-mesh 1 RANK DIGEST NODE           the node that it has dialled

The digest is of the nonce, the group rank and the `scope`, which names the job, its coordinator and the round: another
agent, or another job's, cannot give the one that is expected. It is no protection against people.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from rallypoint.base.log import printable

_MAGIC = b"rallypoint-mesh 1 "
_QUESTION = re.compile(rb"rallypoint-mesh 1 ([0-9a-f]{32})\n")
_ANSWER = re.compile(rb"rallypoint-mesh 1 ([0-9]{1,7}) ([0-9a-f]{32}) ([^\n]{1,1020})\n")
QUESTION_BYTES = len(_MAGIC) + 33
MAX_ANSWER = 1100
"""Bytes of an answer at most."""


class MeshNode(NamedTuple):
    """A node of the mesh: the scope is that of the round, the same on all."""

    scope: str
    group_rank: int
    node: str


def question(nonce: str) -> bytes:
    """What a dialler asks; the nonce has 32 hexadecimal digits."""
    return _MAGIC + nonce.encode() + b"\n"


def answer(own: MeshNode, asked: bytes) -> bytes:
    """A node's answer; nothing to any other question."""
    found = _QUESTION.fullmatch(asked)
    if found is None:
        return b""
    name = printable(own.node).encode()
    return b"%s%d %s %s\n" % (_MAGIC, own.group_rank, _digest(own.scope, own.group_rank, found[1].decode()), name)


def why_another(expected: MeshNode, nonce: str, answered: bytes) -> str:
    """Why what has answered is not the node that was dialled; empty if it is."""
    found = _ANSWER.fullmatch(answered)
    if found is None:
        return "no agent of this job listens there" if answered else "the connection is closed without an answer"
    rank = int(found[1])
    name = printable(found[3].decode(errors="replace"))
    if found[2] != _digest(expected.scope, rank, nonce):
        return f"an agent of another job answers there, on {name}"
    if rank != expected.group_rank:
        return f"{name} (group rank {rank}) answers there: two nodes have that address"
    return ""


def _digest(scope: str, rank: int, nonce: str) -> bytes:
    return hashlib.sha256(f"{scope}\n{rank}\n{nonce}".encode()).hexdigest()[:32].encode()
