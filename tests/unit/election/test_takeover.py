"""The state with which a new coordinator starts, and its wait for nodes without a key."""

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


@pytest.mark.parametrize(
    ("values", "nodes", "met", "found"),
    [
        ([], {ONE.number}, "", Takeover("", State(), 0, 0, 0)),
        (stored(RUNNING), {ONE.number, OTHER.number}, "", Takeover("before", RUNNING, 5, 17, 99)),
        (stored(RUNNING), {OTHER.number}, "before", Takeover("before", RUNNING, 5, 17, 99)),
    ],
    ids=["nothing stored", "one of its nodes lives", "we were one of its nodes"],
)
def test_a_stored_state_is_continued(values: list[KeyValue], nodes: set[int], met: str, found: Takeover) -> None:
    assert takeover_from(values, nodes, met, KEYS, SETTINGS) == found


@pytest.mark.parametrize(("left", "hold"), [(RUNNING, recovery_timeout(SETTINGS)), (ENDED, 0.0), (State(), 0.0)])
def test_the_state_of_an_earlier_launch_is_dropped(left: State, hold: float) -> None:
    """The nodes of a running job may still return, if its leases ended only because etcd was away."""
    found = takeover_from(stored(left), {OTHER.number}, "another", KEYS, SETTINGS)
    assert found == Takeover("", State(restart_delay=hold), 5, 17, 99, forgets=True)


@pytest.mark.parametrize("value", [b"somebody's", b"rallypoint-etcd-9 x 1 0 y", b"rallypoint-etcd-2 x 1 0 damaged"])
def test_foreign_states_are_refused(value: bytes) -> None:
    kvs = [KeyValue(KEYS.state, value, 10, 17, 5, 99)]
    with pytest.raises(RendezvousStateError, match="/x/job/state"):
        takeover_from(kvs, {ONE.number}, "", KEYS, SETTINGS)


def test_a_short_lease_leaves_time_for_retransmissions() -> None:
    assert min_absence(SETTINGS) == SETTINGS.lease / 3
    assert min_absence(SETTINGS._replace(lease=0.5)) == MIN_ABSENCE


def kv(name: NodeId, seat: int = 0, created: int = 1) -> KeyValue:
    return KeyValue(KEYS.seat(seat), encode_node(name), created, created, 1, 1)


def gone(seat: int) -> WatchEvent:
    return WatchEvent("delete", KeyValue(KEYS.seat(seat), b"", 0, 0, 0, 0))


def test_a_node_without_a_key_is_lost_once_after_its_time() -> None:
    presence = Presence([kv(ONE), kv(OTHER, 1)])
    assert presence.wake_at == math.inf
    presence.change([gone(0)], 5.0)
    assert presence.wake_at == 5.0
    assert not presence.overdue(4.9)
    assert presence.overdue(5.0) == {ONE.number}
    assert not presence.overdue(9.0)
    assert presence.wake_at == math.inf


def test_a_node_with_another_key_is_not_lost() -> None:
    presence = Presence([kv(ONE)])
    presence.change([gone(0)], 5.0)
    presence.change([WatchEvent("put", kv(ONE, 1))], 6.0)
    assert not presence.overdue(7.0)
    assert presence.nodes == {ONE.number}
    presence = Presence([kv(ONE), kv(ONE, 1)])
    presence.change([gone(0)], 5.0)
    assert presence.wake_at == math.inf


def test_a_node_whose_seat_another_took_is_awaited() -> None:
    presence = Presence([kv(ONE)])
    presence.change([WatchEvent("put", kv(ONE))], 4.0)
    assert presence.wake_at == math.inf
    presence.change([WatchEvent("put", kv(OTHER))], 5.0)
    assert presence.overdue(5.0) == {ONE.number}
    presence = Presence([kv(ONE), KeyValue(KEYS.candidates + b"odd", b"nobody", 1, 1, 1, 1)])
    presence.replace([kv(OTHER)], 5.0)
    assert presence.nodes == {OTHER.number}
    assert presence.overdue(5.0) == {ONE.number}


def test_a_new_coordinator_waits_a_moment_for_nodes_that_just_lost_their_keys() -> None:
    presence = Presence([kv(ONE), kv(OTHER, 1)])
    presence.change([gone(0)], 5.0)
    presence.change([gone(1)], 50.0)
    presence.await_anew(since=40.0, until=60.0)
    assert presence.wake_at == 60.0
    assert presence.overdue(60.0) == {OTHER.number}, "the other one lost its key long ago"


def test_the_candidate_before_us_is_the_youngest_older_one() -> None:
    presence = Presence([kv(ONE, 2, created=7), kv(OTHER, 0, created=5)])
    assert presence.last_before(9) == kv(ONE, 2, created=7)
    assert presence.last_before(7) == kv(OTHER, 0, created=5)
    assert presence.last_before(5) is None
