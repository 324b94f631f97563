"""The order of lines on a shared console."""

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
    """Everything written if the chunks arrive with these pauses, and the time of the last write."""
    scheduler: LineScheduler[str] = LineScheduler()
    now, written = 0.0, []
    for source, data, pause in chunks:
        until = now + pause
        while (due := scheduler.deadline()) is not None and due <= until:
            now = max(now, due)
            step = scheduler.due_output(now)
            assert step, "a deadline without output"
            written += step
        now = until
        written += scheduler.write_or_queue(source, data, now)
    while (due := scheduler.deadline()) is not None:
        now = max(now, due)
        step = scheduler.due_output(now)
        assert step, "a deadline without output"
        written += step
    assert scheduler.flush() == []
    return written, now


@given(CHUNKS)
def test_no_output_is_lost_or_reordered(chunks: list[tuple[str, bytes, float]]) -> None:
    written, _ = _play(chunks)
    for name in "abc":
        sent = b"".join(data for source, data, _ in chunks if source == name)
        assert b"".join(data for source, data in written if source == name) == sent


@given(CHUNKS)
def test_waits_are_bounded(chunks: list[tuple[str, bytes, float]]) -> None:
    _, end = _play(chunks)
    assert end <= sum(pause for _, _, pause in chunks) + 3 * MAX_WAIT + 1e-6


@given(CHUNKS)
def test_lines_are_not_split_without_pauses(chunks: list[tuple[str, bytes, float]]) -> None:
    """If all lines end and no time passes, the output is a sequence of complete lines."""
    scheduler: LineScheduler[str] = LineScheduler()
    written = []
    for source, data, _ in [*chunks, ("a", b"\n", 0), ("b", b"\n", 0), ("c", b"\n", 0)]:
        written += scheduler.write_or_queue(source, data, 0.0)
    assert scheduler.backlog("a") == scheduler.backlog("b") == scheduler.backlog("c") == 0
    middle_of = None
    for source, data in written:
        assert middle_of in (None, source)
        middle_of = None if data.endswith(b"\n") else source


def test_an_unfinished_line_is_shown_at_once() -> None:
    assert LineScheduler[str]().write_or_queue("a", b"name? ", 0.0) == [("a", b"name? ")]


def test_others_wait_for_the_newline() -> None:
    scheduler: LineScheduler[str] = LineScheduler()
    assert scheduler.write_or_queue("a", b"half a ", 0.0) == [("a", b"half a ")]
    assert scheduler.write_or_queue("b", b"line of b\n", 0.01) == []
    assert scheduler.backlog("b") == 10
    assert scheduler.write_or_queue("a", b"line\nand", 0.02) == [("a", b"line\n"), ("b", b"line of b\n"), ("a", b"and")]


def test_a_silent_writer_loses_the_console() -> None:
    scheduler: LineScheduler[str] = LineScheduler()
    scheduler.write_or_queue("a", b"half", 0.0)
    scheduler.write_or_queue("b", b"b\n", 0.05)
    assert scheduler.deadline() == MAX_SILENCE
    assert scheduler.due_output(MAX_SILENCE - 0.01) == []
    assert scheduler.due_output(MAX_SILENCE) == [("b", b"b\n")]
    assert scheduler.deadline() is None


def test_a_progress_bar_loses_the_console() -> None:
    scheduler: LineScheduler[str] = LineScheduler()
    scheduler.write_or_queue("bar", b"\r0%", 0.0)
    scheduler.write_or_queue("b", b"b\n", 0.0)
    now, written = 0.0, []
    while ("b", b"b\n") not in written:
        now += MAX_SILENCE / 2
        written += scheduler.write_or_queue("bar", b"\r1%", now)
    assert now <= MAX_WAIT + MAX_SILENCE


def test_flush() -> None:
    scheduler: LineScheduler[str] = LineScheduler()
    scheduler.write_or_queue("a", b"half", 0.0)
    scheduler.write_or_queue("b", b"b1\nb2", 0.0)
    assert scheduler.flush() == [("b", b"b1\nb2")]
    assert scheduler.flush() == []
