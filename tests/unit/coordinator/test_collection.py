"""Collections from many nodes: a few at a time, with limits, and all nodes accounted for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.control.membership.state import NodeId
from rallypoint.control.protocol.messages import CollectKind
from rallypoint.observe.watching.collection import LIMITS, Collection
from tests.unit.coordinator.test_snapshots import node_id

BUNDLE = LIMITS[CollectKind.BUNDLE]
LOGS = LIMITS[CollectKind.LOGS]


class Collected:
    def __init__(self, nodes: int, kind: CollectKind = CollectKind.BUNDLE, *, follows: bool = False) -> None:
        self.nodes = [node_id(number) for number in range(nodes)]
        self.asked: list[NodeId] = []
        self.away: set[NodeId] = set()
        self.made = Collection(kind, self.nodes, self._in_reach, self.asked.extend, 0.0, follows=follows)

    def _in_reach(self, node: NodeId) -> bool:
        return node not in self.away


def followed(nodes: int) -> Collected:
    return Collected(nodes, CollectKind.LOGS, follows=True)


def test_the_next_nodes_are_asked_when_the_receiver_has_read() -> None:
    job = Collected(3 * BUNDLE.at_once)
    assert job.asked == job.nodes[: BUNDLE.at_once]
    for node in list(job.asked):
        assert job.made.pass_on(node, b"all of it", True) == b"all of it"
    assert len(job.asked) == BUNDLE.at_once, "nothing is read yet"
    for at in range(BUNDLE.at_once):
        job.made.on_read(1.0)
        assert len(job.asked) == BUNDLE.at_once + at + 1
    for node in job.asked[BUNDLE.at_once :]:
        job.made.pass_on(node, b"", True)
    job.made.tick(1.0 + BUNDLE.seconds)
    assert job.asked == job.nodes, "a receiver that reads nothing delays the others for a while"
    assert job.made.silent == []
    assert not job.made.is_over


def test_silent_nodes_make_room_and_are_named() -> None:
    job = Collected(BUNDLE.at_once + 1)
    job.made.tick(BUNDLE.seconds - 0.1)
    assert len(job.asked) == BUNDLE.at_once
    assert job.made.wake_at() == BUNDLE.seconds
    job.made.tick(BUNDLE.seconds)
    assert job.made.silent == job.nodes[:-1]
    assert job.asked == job.nodes


def test_lost_nodes_are_not_asked() -> None:
    job = Collected(BUNDLE.at_once + 3)
    job.away = set(job.nodes[-2:])
    job.made.forget(job.nodes[0], 1.0)
    assert job.asked == job.nodes[:-2]
    assert job.made.lost == [job.nodes[0]]
    job.made.forget(job.nodes[1], 1.0)
    assert job.made.lost == [job.nodes[0], job.nodes[1], *job.nodes[-2:]]


def test_nobody_is_asked_beyond_the_limit_of_all() -> None:
    job = Collected(12_500)
    part = bytes(BUNDLE.of_node)
    passed, turn = 0, 0
    while not job.made.is_over:
        passed += len(job.made.pass_on(job.asked[turn], part, True))
        job.made.on_read(1.0)
        turn += 1
    assert passed == BUNDLE.of_all
    assert len(job.made.cut) == len(job.asked) - passed // len(part)
    assert job.made.not_asked == 12_500 - len(job.asked) > 12_000


def test_a_node_that_sends_too_much_is_cut() -> None:
    job = Collected(1000, CollectKind.STACKS)
    most = LIMITS[CollectKind.STACKS].of_node
    assert job.made.pass_on(job.nodes[0], bytes(2 * most), False) == b""
    assert job.made.pass_on(job.nodes[0], b"rest", True) == b""
    assert job.made.pass_on(job.nodes[1], b"x", True) == b"x"
    assert list(job.made.cut) == [job.nodes[0]]


def test_a_collection_ends_in_time() -> None:
    job = Collected(12_500)
    now = 0.0
    while not job.made.is_over:
        now = job.made.wake_at()
        job.made.tick(now)
    assert now == BUNDLE.longest
    assert len(job.made.silent) + job.made.not_asked == 12_500


def test_a_followed_node_is_asked_again_when_its_answer_was_read() -> None:
    job = followed(2)
    first, second = job.nodes
    assert job.made.pass_on(second, b"x", True) == b"x"
    assert job.asked == [first, second]
    job.made.on_read(1.0)
    assert job.asked == [first, second, second]
    job.made.tick(LOGS.seconds + 0.5)
    assert job.asked == [first, second, second, first], "a silent node is asked again"
    assert not job.made.is_over


def test_following_has_no_limit_of_all() -> None:
    job = followed(1)
    part = bytes(LOGS.of_node)
    for _ in range(2 * LOGS.of_all // len(part)):
        assert job.made.pass_on(job.nodes[0], part, True) == part
        job.made.on_read(1.0)


def test_new_nodes_are_followed_and_lost_ones_not_awaited() -> None:
    job = followed(2)
    job.made.add([*job.nodes, node_id(7)], 1.0)
    assert job.asked == [*job.nodes, node_id(7)]
    job.away = {job.nodes[0]}
    job.made.forget(job.nodes[0], 1.0)
    job.made.finish(2.0)
    over = [job.made.is_over]
    for node in (job.nodes[1], node_id(7)):
        assert job.made.pass_on(node, b"last words", True) == b"last words"
        job.made.on_read(2.0)
        over.append(job.made.is_over)
    assert over == [False, False, True], "pending answers still arrive"
    assert job.asked == [*job.nodes, node_id(7)]
    assert (job.made.lost, job.made.silent) == ([], [])


@given(st.integers(0, 200), st.lists(st.tuples(st.sampled_from(["send", "read", "lose", "wait"]), st.integers(0, 200))))
def test_every_node_is_counted_once(nodes: int, events: list[tuple[str, int]]) -> None:
    job = Collected(nodes)
    now, whole = 0.0, 0
    for what, number in [*events, *[("wait", 200)] * 8]:
        node = node_id(number)
        if what == "send" and node in job.made:
            job.made.pass_on(node, b"x", True)
            whole += 1
        elif what == "read":
            job.made.on_read(now)
        elif what == "lose":
            job.away.add(node)
            job.made.forget(node, now)
        elif what == "wait":
            now += number
            job.made.tick(now)
        assert len(job.made._until) <= BUNDLE.at_once
        assert set(job.made._sizes) <= set(job.made._until)
    assert job.made.is_over
    assert whole + len(job.made.silent) + len(job.made.lost) + job.made.not_asked == nodes
