"""`Rejoin` leaves the same state as one join per node."""

from __future__ import annotations

from itertools import zip_longest

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rallypoint.control.membership.state import (
    Exit,
    Fail,
    Join,
    NodeId,
    Operation,
    Reason,
    Rejoin,
    Settings,
    State,
    Succeed,
)
from tests.effort import examples
from tests.unit.membership.running import CAUSE, INFO, SEVEN, done

OPERATIONS = st.sampled_from([Join(INFO), Succeed(0), Exit(Reason.LOST)])


@settings(max_examples=examples(500))
@given(
    st.integers(1, 3),
    st.integers(3, 7),
    st.sampled_from([0.0, 5.0]),
    st.lists(st.tuples(st.sampled_from(SEVEN), OPERATIONS), max_size=8),
    st.lists(st.sampled_from(SEVEN), max_size=4),
    st.sampled_from([(1, ""), (2, "AABBAAB"), (2, "ABABABA")]),
)
def test_rejoining_equals_joining_one_by_one(
    least: int,
    most: int,
    backoff: float,
    before: list[tuple[NodeId, Join | Succeed | Exit]],
    come: list[NodeId],
    segments: tuple[int, str],
) -> None:
    segment, domains = segments
    least, most = (number - number % segment or segment for number in (least, most))
    job = Settings("job", least, most, last_call_timeout=5.0, restart_backoff=backoff, segment=segment)
    info = {node: INFO._replace(domain=domain) for node, domain in zip_longest(SEVEN, domains, fillvalue="")}

    def run(state: State, node: NodeId, operation: Operation) -> State:
        return done(state, node, Join(info[node]) if isinstance(operation, Join) else operation, job)

    state = State()
    for node in SEVEN[: 3 * segment]:
        state = run(state, node, Join(INFO))
    for node, operation in before:
        state = run(state, node, operation)
    assume(state.complete and not state.closed and bool(state.participants))
    ended = run(state, next(iter(state.participants)), Fail(state.round, CAUSE, 9))
    for node in come:
        if node not in ended.survivors:
            ended = run(ended, node, Join(INFO))
    assume(ended.survivors)
    infos = {node: info[node]._replace(store_port=7100 + number) for number, node in enumerate(ended.survivors)}
    one_by_one = ended
    for node, own in infos.items():
        one_by_one = done(one_by_one, node, Join(own), job)
    assert run(ended, next(iter(infos)), Rejoin(infos)) == one_by_one
