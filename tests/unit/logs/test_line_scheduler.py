"""Which worker may write to a shared console: laws over any order of events, and single cases."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.workers.logs.console import MAX_SILENCE, MAX_WAIT, LineScheduler

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
    scheduler: LineScheduler[str] = LineScheduler()
    now, written = 0.0, []
    for source, data, pause in chunks:
        until = now + pause
        while (due := scheduler.deadline()) is not None and due <= until:
            now = max(now, due)
            step = scheduler.due_output(now)
            assert step, "a deadline came and nobody was let in"
            written += step
        now = until
        written += scheduler.write_or_queue(source, data, now)
    while (due := scheduler.deadline()) is not None:
        now = max(now, due)
        step = scheduler.due_output(now)
        assert step, "a deadline came and nobody was let in"
        written += step
    assert scheduler.flush() == []
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
    scheduler: LineScheduler[str] = LineScheduler()
    written = []
    for source, data, _ in [*chunks, ("a", b"\n", 0), ("b", b"\n", 0), ("c", b"\n", 0)]:
        written += scheduler.write_or_queue(source, data, 0.0)
    assert scheduler.backlog("a") == scheduler.backlog("b") == scheduler.backlog("c") == 0
    middle_of = None
    for source, data in written:
        assert middle_of in (None, source)
        middle_of = None if data.endswith(b"\n") else source


def test_a_prompt_is_shown_at_once() -> None:
    assert LineScheduler[str]().write_or_queue("a", b"name? ", 0.0) == [("a", b"name? ")]


def test_another_waits_for_the_newline() -> None:
    scheduler: LineScheduler[str] = LineScheduler()
    assert scheduler.write_or_queue("a", b"half a ", 0.0) == [("a", b"half a ")]
    assert scheduler.write_or_queue("b", b"line of b\n", 0.01) == []
    assert scheduler.backlog("b") == 10
    assert scheduler.write_or_queue("a", b"line\nand", 0.02) == [("a", b"line\n"), ("b", b"line of b\n"), ("a", b"and")]


def test_a_silent_holder_loses_the_console_after_max_silence() -> None:
    scheduler: LineScheduler[str] = LineScheduler()
    scheduler.write_or_queue("a", b"half", 0.0)
    scheduler.write_or_queue("b", b"b\n", 0.05)
    assert scheduler.deadline() == MAX_SILENCE
    assert scheduler.due_output(MAX_SILENCE - 0.01) == []
    assert scheduler.due_output(MAX_SILENCE) == [("b", b"b\n")]
    assert scheduler.deadline() is None


def test_a_busy_progress_bar_cannot_keep_others_waiting_for_ever() -> None:
    scheduler: LineScheduler[str] = LineScheduler()
    scheduler.write_or_queue("bar", b"\r0%", 0.0)
    scheduler.write_or_queue("b", b"b\n", 0.0)
    now, written = 0.0, []
    while ("b", b"b\n") not in written:
        now += MAX_SILENCE / 2
        written += scheduler.write_or_queue("bar", b"\r1%", now)
    assert now <= MAX_WAIT + MAX_SILENCE


def test_flush_lets_the_holder_end_first() -> None:
    scheduler: LineScheduler[str] = LineScheduler()
    scheduler.write_or_queue("a", b"half", 0.0)
    scheduler.write_or_queue("b", b"b1\nb2", 0.0)
    assert scheduler.flush() == [("b", b"b1\nb2")]
    assert scheduler.flush() == []
