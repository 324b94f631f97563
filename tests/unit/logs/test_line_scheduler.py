"""Turns on a shared console: laws over any order of events, and the cases a person thinks of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.logs.line_scheduler import MAX_SILENCE, MAX_WAIT, LineScheduler

CHUNKS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.binary(min_size=1, max_size=4).map(lambda data: data.replace(b"\x01", b"\n")) | st.just(b"x\n"),
        st.sampled_from([0.0, 0.01, MAX_SILENCE, MAX_WAIT]),
    ),
    max_size=40,
)


def _play(chunks: list[tuple[str, bytes, float]]) -> tuple[list[tuple[str, bytes]], float]:
    """All that is written when time stands still as told between chunks, deadlines kept, and the last moment."""
    turns: LineScheduler[str] = LineScheduler()
    now, written = 0.0, []
    for source, data, pause in chunks:
        until = now + pause
        while (due := turns.deadline()) is not None and due <= until:
            now = max(now, due)
            step = turns.due_output(now)
            assert step, "a deadline came and nobody was let in"
            written += step
        now = until
        written += turns.write_or_queue(source, data, now)
    while (due := turns.deadline()) is not None:
        now = max(now, due)
        step = turns.due_output(now)
        assert step, "a deadline came and nobody was let in"
        written += step
    assert turns.flush() == []
    return written, now


@given(CHUNKS)
def test_each_source_is_carried_whole_and_in_order(chunks: list[tuple[str, bytes, float]]) -> None:
    written, _ = _play(chunks)
    for name in "abc":
        said = b"".join(data for source, data, _ in chunks if source == name)
        assert b"".join(data for source, data in written if source == name) == said


@given(CHUNKS)
def test_nobody_waits_longer_than_the_limit_for_each_before_him(chunks: list[tuple[str, bytes, float]]) -> None:
    _, end = _play(chunks)
    assert end <= sum(pause for _, _, pause in chunks) + 3 * MAX_WAIT + 1e-6


@given(CHUNKS)
def test_without_pauses_no_line_is_cut(chunks: list[tuple[str, bytes, float]]) -> None:
    """When all lines end and no time passes, what is written is a sequence of whole lines."""
    turns: LineScheduler[str] = LineScheduler()
    written = []
    for source, data, _ in [*chunks, ("a", b"\n", 0), ("b", b"\n", 0), ("c", b"\n", 0)]:
        written += turns.write_or_queue(source, data, 0.0)
    assert turns.backlog("a") == turns.backlog("b") == turns.backlog("c") == 0
    middle_of = None
    for source, data in written:
        assert middle_of in (None, source)
        middle_of = None if data.endswith(b"\n") else source


def test_a_prompt_is_shown_at_once() -> None:
    assert LineScheduler[str]().write_or_queue("a", b"name? ", 0.0) == [("a", b"name? ")]


def test_another_waits_for_the_newline() -> None:
    turns: LineScheduler[str] = LineScheduler()
    assert turns.write_or_queue("a", b"half a ", 0.0) == [("a", b"half a ")]
    assert turns.write_or_queue("b", b"line of b\n", 0.01) == []
    assert turns.backlog("b") == 10
    assert turns.write_or_queue("a", b"line\nand", 0.02) == [("a", b"line\n"), ("b", b"line of b\n"), ("a", b"and")]


def test_a_silent_holder_loses_the_turn_after_the_quiet_time() -> None:
    turns: LineScheduler[str] = LineScheduler()
    turns.write_or_queue("a", b"half", 0.0)
    turns.write_or_queue("b", b"b\n", 0.05)
    assert turns.deadline() == MAX_SILENCE
    assert turns.due_output(MAX_SILENCE - 0.01) == []
    assert turns.due_output(MAX_SILENCE) == [("b", b"b\n")]
    assert turns.deadline() is None


def test_a_busy_progress_bar_cannot_keep_others_waiting_for_ever() -> None:
    turns: LineScheduler[str] = LineScheduler()
    turns.write_or_queue("bar", b"\r0%", 0.0)
    turns.write_or_queue("b", b"b\n", 0.0)
    now, written = 0.0, []
    while ("b", b"b\n") not in written:
        now += MAX_SILENCE / 2
        written += turns.write_or_queue("bar", b"\r1%", now)
    assert now <= MAX_WAIT + MAX_SILENCE


def test_flush_lets_the_holder_end_first() -> None:
    turns: LineScheduler[str] = LineScheduler()
    turns.write_or_queue("a", b"half", 0.0)
    turns.write_or_queue("b", b"b1\nb2", 0.0)
    assert turns.flush() == [("b", b"b1\nb2")]
    assert turns.flush() == []
