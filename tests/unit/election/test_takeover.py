"""The state from which a new coordinator starts, and how long it waits for nodes without a key."""

from __future__ import annotations

import math

import pytest

from rallypoint.control.election.journal import takeover_from
from rallypoint.control.election.keys import ElectionKeys, encode_node, encode_snapshot
from rallypoint.control.election.procedures import MIN_ABSENCE, Presence, min_absence
from rallypoint.control.election.steps import Takeover
from rallypoint.control.etcd.api import KeyValue, WatchEvent
from rallypoint.control.membership.state import (
    NodeId,
    NodeInfo,
    Outcome,
    Participant,
    Settings,
    State,
    Verdict,
    recovery_timeout,
)
from rallypoint.control.protocol.codec import encode_state
from rallypoint.control.protocol.errors import RendezvousStateError

KEYS = ElectionKeys.for_job("/x", "job")
SETTINGS = Settings("job", 1, 4)
ONE, OTHER = NodeId("10.0.0.1", 7, 1, "one"), NodeId("10.0.0.2", 8, 2, "other")
RUNNING = State(round=3, complete=True, participants={ONE: Participant(NodeInfo("default", 1, "10.0.0.1", 1))})
ENDED = RUNNING._replace(closed=True, verdict=Verdict(Outcome.SUCCEEDED))


def stored(state: State, incarnation: str = "before") -> list[KeyValue]:
    value = encode_snapshot(KEYS, incarnation, 5, encode_state(state))[0]
    return [KeyValue(KEYS.state, value, 10, 17, 5, 99)]


def test_where_nothing_is_kept_a_new_coordinator_begins() -> None:
    assert takeover_from([], {ONE.number}, "", KEYS, SETTINGS) == Takeover("", State(), 0, 0, 0)


@pytest.mark.parametrize(("nodes", "met"), [({ONE.number, OTHER.number}, ""), ({OTHER.number}, "before")])
def test_what_is_kept_is_gone_on_with_where_one_of_its_nodes_lives_or_was_ours(nodes: set[int], met: str) -> None:
    found = takeover_from(stored(RUNNING), nodes, met, KEYS, SETTINGS)
    assert found == Takeover("before", RUNNING, 5, 17, 99)


@pytest.mark.parametrize(("left", "hold"), [(RUNNING, recovery_timeout(SETTINGS)), (ENDED, 0.0), (State(), 0.0)])
def test_what_an_earlier_launch_left_is_not_gone_on_with_and_its_nodes_may_still_come_back(
    left: State, hold: float
) -> None:
    """Its leases may have ended because etcd was away; where it had ended itself, there is nobody to wait for."""
    found = takeover_from(stored(left), {OTHER.number}, "another", KEYS, SETTINGS)
    assert found == Takeover("", State(restart_delay=hold), 5, 17, 99, forgets=True)


@pytest.mark.parametrize("value", [b"somebody's", b"rallypoint-etcd-9 x 1 0 y", b"rallypoint-etcd-2 x 1 0 damaged"])
def test_what_another_has_written_is_not_read(value: bytes) -> None:
    kvs = [KeyValue(KEYS.state, value, 10, 17, 5, 99)]
    with pytest.raises(RendezvousStateError, match="/x/job/state"):
        takeover_from(kvs, {ONE.number}, "", KEYS, SETTINGS)


def test_a_short_lease_leaves_time_to_send_a_packet_again() -> None:
    assert min_absence(SETTINGS) == SETTINGS.lease / 3
    assert min_absence(SETTINGS._replace(lease=0.5)) == MIN_ABSENCE


def kv(name: NodeId, seat: int = 0, created: int = 1) -> KeyValue:
    return KeyValue(KEYS.seat(seat), encode_node(name), created, created, 1, 1)


def gone(seat: int) -> WatchEvent:
    return WatchEvent("delete", KeyValue(KEYS.seat(seat), b"", 0, 0, 0, 0))


def test_who_has_lost_its_key_is_lost_once_when_its_time_is_over() -> None:
    presence = Presence([kv(ONE), kv(OTHER, 1)])
    assert presence.wake_at == math.inf
    presence.change([gone(0)], 5.0)
    assert presence.wake_at == 5.0
    assert not presence.overdue(4.9)
    assert presence.overdue(5.0) == {ONE.number}
    assert not presence.overdue(9.0)
    assert presence.wake_at == math.inf


def test_who_has_a_key_again_is_not_lost() -> None:
    presence = Presence([kv(ONE)])
    presence.change([gone(0)], 5.0)
    presence.change([WatchEvent("put", kv(ONE, 1))], 6.0)
    assert not presence.overdue(7.0)
    assert presence.nodes == {ONE.number}


def test_a_node_whose_seat_another_has_is_awaited_like_one_whose_key_is_gone() -> None:
    presence = Presence([kv(ONE)])
    presence.change([WatchEvent("put", kv(ONE))], 4.0)
    assert presence.wake_at == math.inf
    presence.change([WatchEvent("put", kv(OTHER))], 5.0)
    assert presence.overdue(5.0) == {ONE.number}


def test_who_has_two_keys_and_loses_one_is_there() -> None:
    presence = Presence([kv(ONE), kv(ONE, 1)])
    presence.change([gone(0)], 5.0)
    assert presence.wake_at == math.inf


def test_a_new_coordinator_gives_those_who_have_just_lost_their_key_a_moment() -> None:
    presence = Presence([kv(ONE), kv(OTHER, 1)])
    presence.change([gone(0)], 5.0)
    presence.change([gone(1)], 50.0)
    presence.await_anew(since=40.0, until=60.0)
    assert presence.wake_at == 60.0
    assert presence.overdue(60.0) == {OTHER.number}, "the other one has done without a key for long"


def test_what_is_read_again_tells_who_is_gone_and_who_is_there() -> None:
    presence = Presence([kv(ONE), KeyValue(KEYS.candidates + b"odd", b"nobody", 1, 1, 1, 1)])
    presence.replace([kv(OTHER)], 5.0)
    assert presence.nodes == {OTHER.number}
    assert presence.overdue(5.0) == {ONE.number}


def test_the_youngest_of_the_older_candidates_is_before_us() -> None:
    presence = Presence([kv(ONE, 2, created=7), kv(OTHER, 0, created=5)])
    assert presence.last_before(9) == kv(ONE, 2, created=7)
    assert presence.last_before(7) == kv(OTHER, 0, created=5)
    assert presence.last_before(5) is None
