"""A coordinator writes only with its fence, in order, and nothing twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.control.election.journal import CannotWrite, Journal, NotYet, PartWritten, Written
from rallypoint.control.election.keys import ElectionKeys, decode_snapshot, state_of
from rallypoint.control.election.steps import Fence, Takeover, Txn
from rallypoint.control.etcd.api import Delete, EtcdLeaseGone, EtcdRefused, EtcdUnreachable, Put, TxnResult
from rallypoint.control.membership.state import State
from rallypoint.control.protocol.codec import decode_state
from tests.sim.etcd import Etcd
from tests.unit.election.cluster import Cluster

KEYS = ElectionKeys.for_job("/x", "job")
DEPOSED = CannotWrite("another agent is the coordinator now")
AWAY = EtcdUnreachable("away")


SMALL = KEYS._replace(part_size=20)


def begun(etcd: Etcd, lease: int, incarnation: str = "me", keys: ElectionKeys = KEYS) -> Journal:
    """The journal of a new leader that has read the stored state."""
    key = KEYS.seat(lease)
    created = etcd.txn([], [Put(key, b"")]).revision
    state = etcd.stored.get(KEYS.state)
    revision = 0 if state is None else state.mod_revision
    number = 0 if state is None else decode_snapshot(KEYS.state, state.value).number
    takeover = Takeover(incarnation, State(), number, revision, lease=0)
    return Journal(keys, Fence((key, created)), incarnation, takeover)


def made(etcd: Etcd, write: Txn | None) -> TxnResult:
    assert write is not None
    return etcd.txn(write.compares, write.then, write.otherwise)


def kept(etcd: Etcd) -> State:
    stored = [etcd.stored[key] for key in sorted(etcd.stored) if key.startswith(KEYS.state)]
    return decode_state(state_of(KEYS, decode_snapshot(KEYS.state, stored[0].value), stored))


@pytest.fixture(name="etcd")
def _etcd() -> Etcd:
    return Cluster().etcd


def test_changes_during_a_write_are_written_together(etcd: Etcd) -> None:
    journal = begun(etcd, 1)
    assert journal.next_write() is None
    journal.append(1, State(round=1), 1)
    first = journal.next_write()
    journal.append(2, State(round=2), 2)
    journal.append(3, State(round=3), 3)
    assert journal.next_write() == first
    assert journal.writing == 1
    assert journal.on_answer(made(etcd, first)) == Written(1)
    assert journal.on_answer(made(etcd, journal.next_write())) == Written(3)
    assert kept(etcd) == State(round=3)
    assert journal.is_idle
    assert journal.next_write() is None


def test_states_that_nobody_awaits_may_be_written_later(etcd: Etcd) -> None:
    journal = begun(etcd, 1)
    journal.append(1, State(round=1), 0)
    assert (journal.is_idle, journal.is_awaited) == (False, False)
    journal.append(1, State(round=1), 1)
    assert (journal.is_idle, journal.is_awaited) == (False, True)
    assert journal.on_answer(made(etcd, journal.next_write())) == Written(1)
    journal.append(2, State(round=2), 1)
    assert (journal.is_idle, journal.is_awaited) == (False, False)
    journal.write_now()
    assert (journal.is_idle, journal.is_awaited) == (False, True)


def test_a_write_without_an_answer_is_repeated(etcd: Etcd) -> None:
    journal = begun(etcd, 1)
    journal.append(1, State(round=1), 1)
    made(etcd, journal.next_write())
    assert journal.on_error(AWAY) == NotYet("away")
    journal.append(2, State(round=2), 2)
    assert journal.on_answer(made(etcd, journal.next_write())) == Written(1)
    assert journal.on_answer(made(etcd, journal.next_write())) == Written(2)


def test_a_deposed_coordinator_writes_nothing(etcd: Etcd) -> None:
    first = begun(etcd, 1)
    first.append(1, State(round=1), 1)
    etcd.txn([], [Delete(KEYS.seat(1))])
    assert first.on_answer(made(etcd, first.next_write())) == DEPOSED
    assert KEYS.state not in etcd.stored
    second = begun(etcd, 2)
    second.append(1, State(round=1), 1)
    assert second.on_answer(made(etcd, second.next_write())) == Written(1)
    assert first.on_answer(made(etcd, first.next_write())) == DEPOSED, "the same state of a successor is not its own"


def test_foreign_changes_are_not_overwritten(etcd: Etcd) -> None:
    journal = begun(etcd, 1)
    journal.append(1, State(round=1), 1)
    etcd.txn([], [Put(KEYS.state, b"somebody's")])
    over = journal.on_answer(made(etcd, journal.next_write()))
    assert isinstance(over, CannotWrite)
    assert "somebody's" in over.why
    assert etcd.stored[KEYS.state].value == b"somebody's"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (EtcdLeaseGone("requested lease not found"), "the lease of the job's state has ended"),
        (EtcdRefused("etcd answered 'permission denied'"), "etcd answered 'permission denied'"),
    ],
)
def test_a_refused_write_ends_the_journal(etcd: Etcd, error: EtcdLeaseGone | EtcdRefused, why: str) -> None:
    journal = begun(etcd, 1)
    journal.append(1, State(), 1)
    assert journal.next_write() is not None
    assert journal.on_error(error) == CannotWrite(why)


def parts(etcd: Etcd) -> set[bytes]:
    return {key for key in etcd.stored if key.startswith(KEYS.state) and key != KEYS.state}


def all_written(etcd: Etcd, journal: Journal) -> None:
    while (write := journal.next_write()) is not None:
        assert max(len(each.value) for each in write.then if isinstance(each, Put)) < 400, "no large request"
        assert journal.on_answer(made(etcd, write)) in (PartWritten(), Written(journal._done))


def test_a_large_state_is_written_in_parts(etcd: Etcd) -> None:
    journal = begun(etcd, 1, keys=SMALL)
    for number in (1, 2, 3):
        journal.append(number, State(round=number), number)
        all_written(etcd, journal)
        assert kept(etcd) == State(round=number)
        assert all(key.startswith(KEYS.parts(number)) for key in parts(etcd))
        assert len(parts(etcd)) > 1


def test_an_incomplete_state_does_not_count(etcd: Etcd) -> None:
    journal = begun(etcd, 1, keys=SMALL)
    journal.append(1, State(round=1), 1)
    all_written(etcd, journal)
    journal.append(2, State(round=2), 2)
    assert journal.on_answer(made(etcd, journal.next_write())) == PartWritten()
    assert kept(etcd) == State(round=1)
    etcd.txn([], [Delete(KEYS.seat(1))])
    assert journal.on_answer(made(etcd, journal.next_write())) == DEPOSED
    successor = begun(etcd, 2)  # its state needs no parts
    for number in (1, 2):
        successor.append(number, State(round=7), number)
        all_written(etcd, successor)
    assert kept(etcd) == State(round=7)
    assert not parts(etcd), "nor any of an incomplete write"


@given(st.lists(st.sampled_from(["keep", "write", "lost", "away"]), max_size=40))
def test_states_are_written_in_order(turns: list[str]) -> None:
    etcd = Cluster().etcd
    journal = begun(etcd, 1, keys=KEYS._replace(part_size=100))
    number, done = 0, 0
    for what in [*turns, *20 * ["write"]]:
        if what == "keep":
            number += 1
            journal.append(number, State(round=number), number)
        elif (write := journal.next_write()) is not None:
            assert journal.writing > done
            if what != "away":
                result = made(etcd, write)
            outcome = journal.on_answer(result) if what == "write" else journal.on_error(AWAY)
            if isinstance(outcome, Written):
                assert kept(etcd) == State(round=outcome.number)
                assert outcome.number > done
                done = outcome.number
            else:
                assert outcome == NotYet("away") or (what == "write" and outcome == PartWritten())
    assert done == number
