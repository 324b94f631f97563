"""Ranks in segments, compared with the best of all choices, and rounds of whole segments."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.control.membership.segments import Claim, nodes_in_segments, segment_ranks, what_a_node_waits_for
from rallypoint.control.membership.state import (
    Exit,
    Fail,
    Join,
    NodeId,
    NodeRange,
    Reason,
    Resize,
    Settings,
    State,
)
from tests.effort import examples
from tests.unit.membership.running import CAUSE, INFO, done

DOMAINS = "ABC"


class _Case:
    """Nodes of a round of whole segments, some of which have survived, and new ones."""

    def __init__(
        self, size: int, most: int, old: list[tuple[str, list[bool]]], new: list[tuple[str, int | None]]
    ) -> None:
        self.size, self.most = size, most * size
        claims = [
            Claim(domain, slot * size + at)
            for slot, (domain, alive) in enumerate(old)
            for at in range(size)
            if alive[at]
        ]
        claims += [Claim(domain, None, hint) for domain, hint in new]
        self.claims = dict(enumerate(claims))
        self.ranks = segment_ranks(self.claims, size, self.most)
        self.number = len(self.ranks) // size

    def slots(self) -> list[list[int]]:
        in_order = sorted(self.ranks, key=self.ranks.__getitem__)
        return [in_order[start : start + self.size] for start in range(0, len(in_order), self.size)]

    def kept(self, node: int) -> bool:
        return self.ranks.get(node, -1) == self.claims[node].previous

    def full_segments_of_before(self) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for node, claim in self.claims.items():
            if claim.previous is not None:
                found.setdefault(claim.previous // self.size, []).append(node)
        return [nodes for nodes in found.values() if len(nodes) == self.size]

    def best(self) -> tuple[int, int, int]:
        """The most segments, then survivors with their ranks, then survivors in the round."""
        have = Counter(claim.domain for claim in self.claims.values())
        survivors = Counter(claim.domain for claim in self.claims.values() if claim.previous is not None)
        present = Counter(
            (claim.previous // self.size, claim.domain) for claim in self.claims.values() if claim.previous is not None
        )
        found = []
        for number in range(self.most // self.size + 1):
            for choice in product(DOMAINS, repeat=number):
                used = Counter(choice)
                if all(have[domain] >= self.size * count for domain, count in used.items()):
                    kept = sum(present[slot, domain] for slot, domain in enumerate(choice))
                    part = sum(min(survivors[domain], self.size * count) for domain, count in used.items())
                    found.append((number, kept, part))
        return max(found)


def _cases() -> st.SearchStrategy[_Case]:
    def of(size: int) -> st.SearchStrategy[_Case]:
        alive = st.lists(st.booleans(), min_size=size, max_size=size)
        old = st.lists(st.tuples(st.sampled_from(DOMAINS), alive), max_size=4)
        new = st.lists(st.tuples(st.sampled_from(DOMAINS), st.none() | st.integers(0, 9)), max_size=7)
        return st.builds(_Case, st.just(size), st.integers(1, 4), old, new)

    return st.sampled_from([2, 3]).flatmap(of)


@settings(max_examples=examples(500))
@given(_cases())
def test_segment_ranks_are_the_best_choice(case: _Case) -> None:
    assert sorted(case.ranks.values()) == list(range(case.number * case.size))
    for nodes in case.slots():
        assert len({case.claims[node].domain for node in nodes}) == 1
    kept = sum(map(case.kept, case.ranks))
    survivors = sum(case.claims[node].previous is not None for node in case.ranks)
    assert (case.number, kept, survivors) == case.best()
    _check_who_moves(case)


def _check_who_moves(case: _Case) -> None:
    stays = {rank // case.size for node, rank in case.ranks.items() if case.kept(node)}
    moved_to = {node: rank for node, rank in case.ranks.items() if rank // case.size not in stays}
    for nodes in case.full_segments_of_before():
        ranks = [moved_to[node] for node in nodes if node in moved_to]
        assert not ranks or ranks == list(range(ranks[0], ranks[0] + case.size)), "a segment was torn apart"
    new_elsewhere = {case.claims[node].domain for node in moved_to if case.claims[node].previous is None}
    for node in case.ranks:
        if node not in moved_to and case.claims[node].previous is not None and not case.kept(node):
            assert case.claims[node].domain not in new_elsewhere, "a survivor filled a hole that a new node could fill"


@given(st.dictionaries(st.integers(0, 30), st.builds(Claim, st.sampled_from("AB"), st.none() | st.integers(0, 40))))
def test_contradicting_claims_make_whole_segments(claims: dict[int, Claim]) -> None:
    ranks = segment_ranks(claims, 3, 12)
    assert sorted(ranks.values()) == list(range(len(ranks)))
    in_order = sorted(ranks, key=ranks.__getitem__)
    assert all(len({claims[node].domain for node in in_order[at : at + 3]}) == 1 for at in range(0, len(in_order), 3))
    domains = Counter(claim.domain for claim in claims.values())
    assert len(ranks) == min(12, sum(count // 3 * 3 for count in domains.values()))


def test_new_segments_follow_rank_hints_and_then_domains() -> None:
    claims = {f"n{rank}": Claim("B" if rank < 4 else "A", None, rank) for rank in reversed(range(8))}
    assert segment_ranks(claims, 2, 8) == {f"n{rank}": rank for rank in range(8)}
    unhinted = {node: Claim(domain) for node, domain in enumerate("ABABABAB")}
    assert [unhinted[node].domain for node in segment_ranks(unhinted, 2, 8)] == list("AAAABBBB")


# Rounds


class _Job:
    """Nodes that repeat their joins until they are placed."""

    def __init__(self, least: int, most: int, size: int = 2) -> None:
        self.settings = Settings("job", least, most, segment=size)
        self.state = State()
        self.waiting: dict[NodeId, Join] = {}

    def join(self, names: str) -> None:
        for name in names.split():
            node = NodeId(name, 1, 0, name)
            self.waiting[node] = Join(INFO._replace(domain=name[0]))
            self.run(node, self.waiting[node])

    def leave(self, *names: str, reason: Reason = Reason.LOST) -> None:
        for name in names:
            self.waiting.pop(NodeId(name, 1, 0, name), None)
            self.run(NodeId(name, 1, 0, name), Exit(reason))

    def fail(self, name: str) -> None:
        self.run(NodeId(name, 1, 0, name), Fail(self.state.round, CAUSE, 99))

    def come_back(self) -> None:
        self.join(" ".join(node.host for node in self.state.survivors))

    def run(self, node: NodeId, operation: Join | Exit | Fail | Resize) -> None:
        run = partial(done, job=self.settings)
        before = None
        self.state = run(self.state, node, operation)
        while before is not self.state:
            before = self.state
            for waiting, join in list(self.waiting.items()):
                if self.state.complete and waiting in self.state.participants:
                    del self.waiting[waiting]
                else:
                    self.state = run(self.state, waiting, join)


def test_a_segment_waits_for_the_next_round_only_with_room() -> None:
    job = _Job(2, 4)
    job.join("a0 a1 b0 b1 c0 c1")
    assert (len(job.state.participants), len(job.state.wait_list), len(job.state.redundancy_list)) == (4, 0, 2)
    for most in (4, 6):
        job.settings = job.settings._replace(max_nodes=most)
        job.run(NodeId("", 0, 0), Resize(NodeRange(2, 6)))
    assert len(job.state.wait_list) == 1


def test_the_join_deadline_ends_a_wait_for_impossible_segments() -> None:
    job = _Job(4, 4)
    job.join("a0 a1 b0 c0 d0")
    late = Join(INFO._replace(domain="b"), deadline=5.0)
    job.state = done(job.state, NodeId("b0", 1, 0, "b0"), late, job.settings)
    assert (job.state.abandoned.number, job.state.abandoned.joined, dict(job.state.participants)) == (1, 2, {})


@pytest.mark.parametrize(
    ("who", "why"),
    [
        ("c0", "no whole segment in its domain (1 of 2 nodes)"),
        ("c0 c1", "the next round"),
        ("c0 c1 d0 d1", "a place: all are taken"),
    ],
)
def test_reasons_of_waiting_spares(who: str, why: str) -> None:
    job = _Job(4, 6)
    job.join("a0 a1 b0 b1")
    job.state = done(job.state, NodeId("a0", 1, 0, "a0"), Join(INFO), job.settings._replace(last_call_timeout=0.0))
    job.join(who)
    assert what_a_node_waits_for(job.state, who[-2], job.settings) == why


_NAMES = [f"{domain}{number}" for domain in "abc" for number in range(4)]


@settings(max_examples=examples(400))
@given(
    st.sampled_from([(2, 4, 2), (4, 4, 2), (2, 6, 2), (3, 6, 3)]),
    st.lists(st.tuples(st.sampled_from(["join", "leave", "fail", "back"]), st.sampled_from(_NAMES)), max_size=40),
)
def test_rounds_always_have_whole_segments(sizes: tuple[int, int, int], events: list[tuple[str, str]]) -> None:
    least, most, size = sizes
    job = _Job(least, most, size)
    for what, name in events:
        before = job.state
        node = NodeId(name, 1, 0, name)
        if what == "join" and not job.state.knows(node):
            job.join(name)
        elif what == "leave":
            job.leave(name)
        elif what == "fail":
            job.fail(name)
        elif what == "back":
            job.come_back()
        state = job.state
        _check(state, job.settings)
        if state.complete and not before.complete:
            held = {each: place.previous_rank for each, place in before.participants.items()}
            gone = {node for node in held if node not in state.participants and held[node] is not None}
            assert all(node in state.redundancy_list for node in gone if state.knows(node))
        if not state.complete and not state.survivors and not state.wait_list and state.round:
            assert nodes_in_segments(state.participants, job.settings) < least, (
                "enough have joined, and none is awaited"
            )


def _check(state: State, job: Settings) -> None:
    if not state.complete:
        assert not state.redundancy_list
        return
    places = sorted(state.participants.values(), key=lambda each: each.rank)
    assert [each.rank for each in places] == list(range(len(places)))
    assert job.min_nodes <= len(places) <= job.max_nodes
    assert len(places) % job.segment == 0
    for at in range(0, len(places), job.segment):
        assert len({each.node_info.domain for each in places[at : at + job.segment]}) == 1
    # A spare has to wait: its domain has no further segment for which there is room, or one of it stands for that.
    spares = Counter(info.domain for info in state.redundancy_list.values())
    waiting = Counter(info.domain for info in state.wait_list.values())
    room = (job.max_nodes - len(places)) // job.segment
    assert sum(waiting.values()) <= room
    for domain in spares | waiting:
        whole = (spares[domain] + waiting[domain]) // job.segment
        assert waiting[domain] <= whole
        assert waiting[domain] == whole or sum(waiting.values()) == room
