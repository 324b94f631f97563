"""The mesh: which nodes of a round dial each other, how they greet, what they report, and the messages about unreached
nodes.

Pure. Laws:

1. With up to `FULL_MESH` nodes, each dials all others. With more, node r dials r + 2^k and r - 2^k for all such k. Each
   node dials as many nodes as dial it, the same pairs in both directions, and no two nodes are far apart in that graph.
2. All nodes get the same lines, which group rank 0 creates from all findings.
3. Data from another node is checked once, in `decode_finding` and `decode_lines`.
4. A node's greeting is a line with its group rank and a digest of the `scope`, which identifies the job, its
   coordinator and the round. So another machine with the same address is not mistaken for it. This does not stop
   attackers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from rallypoint.base.log import printable
from rallypoint.control.membership.state import join_names

FULL_MESH = 64
"""Up to this many nodes, each dials all others."""
REMEDY = "check firewalls and routes between them, or set the address to use with --local-addr"
FEW = 4
"""Maximum number of nodes named individually."""
MAX_LINES = 20
_MAX_BYTES = 256 * 1024
_MAX_TEXT = 255
_MAX_LINE = 2000


class Finding(NamedTuple):
    """A node's report: its name, the address to dial, and the nodes that it did not reach, with reasons."""

    node: str
    where: str
    failures: Mapping[int, str] = {}


class MeshLine(NamedTuple):
    """A sentence about unreached nodes; `ranks` are the nodes concerned, `node` is one of their names."""

    text: str
    node: str
    ranks: tuple[int, ...]


class MeshNode(NamedTuple):
    """A node in the mesh. The scope identifies the round, and is the same on all nodes."""

    scope: str
    group_rank: int
    node: str


def dialled_ranks(rank: int, count: int) -> list[int]:
    """The group ranks that a node dials in a round of `count` nodes. The same number of nodes dial it."""
    if count <= FULL_MESH:
        return [other for other in range(count) if other != rank]
    steps = [1 << power for power in range(count.bit_length()) if 1 << power < count]
    return sorted({(rank + sign * step) % count for step in steps for sign in (1, -1)} - {rank})


def mesh_lines(findings: Mapping[int, Finding], count: int, absent: Mapping[int, str] = {}) -> list[MeshLine]:
    """Write the lines about a round of `count` nodes, worst first; none if all nodes reach those that they dial.

    Nodes missing in `findings` (by group rank) are reported too. `absent` names nodes known not to take part.
    """
    names = _Names(findings, absent)
    lines = []
    if absent:
        was = "was" if len(absent) == 1 else "were"
        without = sorted(absent)
        text = f"{names.list_of(without)} {was} started without --preflight; use the same value on all nodes"
        lines.append(MeshLine(text, names.node(without[0]), tuple(without)))
    if missing := [rank for rank in range(count) if rank not in findings and rank not in absent]:
        not_told = (
            "did not report in time which nodes it can reach"
            if len(missing) == 1
            else "did not report in time which nodes they can reach"
        )
        text = f"{names.list_of(missing)} {not_told}"
        lines.append(MeshLine(text, "", tuple(missing)))
    pairs = {(dialler, rank): why for dialler, finding in findings.items() for rank, why in finding.failures.items()}
    tried = len(dialled_ranks(0, count))
    while pairs:
        by_target = Counter((rank, why) for (_, rank), why in pairs.items())
        by_dialler = Counter((dialler, why) for (dialler, _), why in pairs.items())
        (target, why), many = max(by_target.items(), key=lambda entry: (entry[1], -entry[0][0]))
        (dialler, reason), more = max(by_dialler.items(), key=lambda entry: (entry[1], -entry[0][0]))
        if many >= more:
            ranks = sorted(source for (source, rank), text in pairs.items() if (rank, text) == (target, why))
            who = names.node(ranks[0]) if many == 1 else names.share(ranks, tried)
            node = names.node(target if len(ranks) > FEW else ranks[0])
            lines.append(
                MeshLine(f"{who} cannot reach {names.node_and_place(target)}: {why}; {REMEDY}", node, (target, *ranks))
            )
            pairs = {pair: text for pair, text in pairs.items() if (pair[1], text) != (target, why)}
        else:
            ranks = sorted(rank for (source, rank), text in pairs.items() if (source, text) == (dialler, reason))
            whom = names.share(ranks, tried, places=True)
            text = f"{names.node(dialler)} cannot reach {whom}: {reason}; {REMEDY}"
            lines.append(MeshLine(text, names.node(dialler), (dialler, *ranks)))
            pairs = {pair: text for pair, text in pairs.items() if (pair[0], text) != (dialler, reason)}
    return lines


class _Names:
    def __init__(self, findings: Mapping[int, Finding], absent: Mapping[int, str]) -> None:
        self._findings = findings
        self._nodes = {rank: finding.node for rank, finding in findings.items()} | dict(absent)
        self._often = Counter(self._nodes.values())

    def node(self, rank: int) -> str:
        node = self._nodes.get(rank)
        if node is None:
            return f"the node of group rank {rank}"
        return node if self._often[node] == 1 else f"{node} (group rank {rank})"

    def node_and_place(self, rank: int) -> str:
        finding = self._findings.get(rank)
        return self.node(rank) if finding is None else f"{self.node(rank)} ({finding.where})"

    def list_of(self, ranks: Sequence[int]) -> str:
        named = [self.node(rank) for rank in ranks[:FEW]]
        return join_names([*named, f"{len(ranks) - FEW} more"] if len(ranks) > FEW else named)

    def share(self, ranks: Sequence[int], tried: int, *, places: bool = False) -> str:
        if len(ranks) > FEW:
            return f"{len(ranks)} of {tried} nodes"
        return join_names([self.node_and_place(rank) if places else self.node(rank) for rank in ranks])


def is_logged_by(line: MeshLine, rank: int) -> bool:
    """Whether a node logs this line: all nodes concerned do; if they are many, only the one that they share does."""
    return rank == 0 or rank in (line.ranks if len(line.ranks) <= FEW + 1 else line.ranks[:1])


# The greeting

MAX_GREETING = 1100
"""Maximum length of a greeting in bytes."""
_GREETING = re.compile(rb"rallypoint-mesh 2 ([0-9]{1,7}) ([0-9a-f]{32}) ([^\n]{1,1020})\n")


def greeting(own: MeshNode) -> bytes:
    name = printable(own.node).encode()
    return b"rallypoint-mesh 2 %d %s %s\n" % (own.group_rank, _digest(own), name)


def why_another(expected: MeshNode, greeted: bytes) -> str:
    match = _GREETING.fullmatch(greeted)
    if match is None:
        return "no agent of this job is listening there" if greeted else "the connection was closed without an answer"
    rank = int(match[1])
    name = printable(match[3].decode(errors="replace"))
    if match[2] != _digest(expected):
        return f"an agent of another job answers there, on {name}"
    if rank != expected.group_rank:
        return f"{name} (group rank {rank}) answers there: two nodes have this address"
    return ""


def _digest(node: MeshNode) -> bytes:
    return hashlib.sha256(node.scope.encode()).hexdigest()[:32].encode()


# The format in the store


def encode_finding(finding: Finding) -> bytes:
    return json.dumps([finding.node, finding.where, sorted(finding.failures.items())]).encode()


def decode_finding(data: bytes, rank: int, count: int) -> Finding:
    """Decode a finding. Raises ValueError with a sentence if it is malformed."""
    try:
        node, where, failures = _loaded(data, 3)
        dialled = set(dialled_ranks(rank, count))
        reasons = {_rank(peer, count): _text(why) for peer, why in failures}
        if not dialled.issuperset(reasons):
            raise ValueError("it reports nodes that it was not asked to dial")
        return Finding(_text(node), _text(where), reasons)
    except (ValueError, TypeError, RecursionError) as error:
        raise _unusable(f"the mesh results of group rank {rank}", error) from None


def encode_lines(lines: Collection[MeshLine]) -> bytes:
    return json.dumps([len(lines), [[line.text, line.node, line.ranks] for line in list(lines)[:MAX_LINES]]]).encode()


def decode_lines(data: bytes, count: int) -> tuple[int, list[MeshLine]]:
    """Decode the number of lines, and the first ones. Raises ValueError with a sentence if they are malformed."""
    try:
        total, lines = _loaded(data, 2)
        if type(total) is not int or not len(lines) <= total <= count * count or len(lines) > MAX_LINES:
            raise ValueError("its number of lines is wrong")
        return total, [
            MeshLine(_text(text, _MAX_LINE), _text(node, least=0), tuple(_rank(rank, count) for rank in ranks))
            for text, node, ranks in lines
        ]
    except (ValueError, TypeError, RecursionError) as error:
        raise _unusable("the mesh report of group rank 0", error) from None


def _loaded(data: bytes, parts: int) -> list[Any]:
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it is {len(data)} bytes long")
    loaded = json.loads(data)
    if not isinstance(loaded, list) or len(loaded) != parts:
        raise ValueError(f"it is not a list of {parts} items")
    return loaded


def _text(value: object, most: int = _MAX_TEXT, least: int = 1) -> str:
    if not isinstance(value, str) or not least <= len(value) <= most or not value.isprintable():
        raise ValueError(f"it contains the invalid text {value!r}")
    return value


def _rank(value: object, count: int) -> int:
    if type(value) is not int or not 0 <= value < count:
        raise ValueError(f"it contains the invalid group rank {value!r}")
    return value


def _unusable(what: str, error: Exception) -> ValueError:
    return ValueError(f"{what} cannot be used ({printable(str(error))}); check that all nodes run the same version")
