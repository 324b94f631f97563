"""Output of a host as complete lines with its name."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.clusters.remote.output import LONGEST, PrefixedLines

MARK = b"\0mark 77 "


def _shown(pieces: list[bytes], mark: bytes = b"") -> tuple[bytes, bytes]:
    lines = PrefixedLines(b"a: ", mark)
    out = b"".join(lines.feed(piece) for piece in pieces)
    rest, last = lines.finish()
    return out + rest, last


def _pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[low:high] for low, high in pairwise(places)]


@given(st.binary(), st.lists(st.integers(0, 1000), max_size=8))
def test_lines_in_any_pieces(data: bytes, cuts: list[int]) -> None:
    shown, last = _shown(_pieces(data, cuts))
    lines = data.removesuffix(b"\n").split(b"\n") if data else []
    assert shown == b"".join(b"a: " + line + b"\n" for line in lines)
    assert last == b""


@given(st.binary().filter(lambda data: b"\0" not in data), st.lists(st.integers(0, 1000), max_size=8))
def test_the_message_after_the_mark(data: bytes, cuts: list[int]) -> None:
    shown, last = _shown(_pieces(data + MARK + b'{"code":1}', cuts), MARK)
    assert last == b'{"code":1}'
    assert shown == _shown([data])[0]


def test_the_mark_after_a_long_line() -> None:
    for size in (LONGEST - 1, LONGEST, LONGEST + len(MARK) - 1, LONGEST + len(MARK), 3 * LONGEST):
        data = b"x" * size
        shown, last = _shown(_pieces(data + MARK + b"{}", list(range(0, size + 100, 1000))), MARK)
        assert last == b"{}"
        assert shown.replace(b"a: ", b"").replace(b"\n", b"") == data
        assert max(map(len, shown.split(b"\n"))) <= LONGEST + len(b"a: ") + len(MARK)


def test_the_size_of_the_last_message() -> None:

    lines = PrefixedLines(b"a: ", MARK)
    lines.feed(b"x\n" * LONGEST + b"y" * 1000 + MARK + b"12345")
    assert lines.last_size == 5
    assert PrefixedLines(b"a: ").last_size == 0


def test_an_endless_line() -> None:
    lines = PrefixedLines(b"a: ", MARK)
    for _ in range(100):
        lines.feed(b"x" * LONGEST)
        assert len(lines.finish()[0]) <= LONGEST + 100


def test_a_progress_bar() -> None:
    lines = PrefixedLines(b"a: ")
    assert lines.feed(b"10%\r20%\r30") == b""
    before = lines.has_progress_bar
    assert lines.progress_bar() == b"a: 10%\r20%\r\n"
    assert (before, lines.has_progress_bar) == (True, False)
    assert lines.progress_bar() == b""
    assert lines.feed(b"%\n") == b"a: 30%\n"
