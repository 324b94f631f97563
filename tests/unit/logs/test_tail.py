"""Following a file, compared with the whole text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rallypoint.workers.logs import tail as module
from rallypoint.workers.logs.console import Chunk
from rallypoint.workers.logs.tail import PROGRESS_BAR_DELAY, PROMPT_DELAY, READ_SIZE, LineFilter, Tail
from tests.effort import examples

WRITES = st.lists(st.binary(max_size=30).map(lambda data: data.replace(b"\x00", b"\n")), max_size=12)


def _prefixed(text: bytes, prefix: bytes) -> bytes:
    """The lines with prefix and newline."""
    lines = text.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return b"".join(prefix + line + b"\n" for line in lines)


def _joined(pieces: Iterator[Chunk]) -> bytes:
    """The content of the pieces, checked one by one."""
    text = b""
    for piece in pieces:
        data = b"".join(piece.parts)
        assert piece.size() == len(data) > 0
        assert piece.ends == data.endswith(b"\n")
        text += data
    return text


@given(writes=WRITES, space=st.sampled_from([7, 40, 1000]), few=st.sampled_from([1, 3, 1000]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(200))
def test_lines_are_complete_and_prefixed(tmp_path: Path, writes: list[bytes], space: int, few: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_FEW_LINES", few)
        _follow_all(tmp_path / "log", writes, bytearray(space))


def _follow_all(path: Path, writes: list[bytes], space: bytearray) -> None:
    path.write_bytes(b"")
    followed = Tail(str(path), b"[p]:")
    shown = b""
    with path.open("ab", buffering=0) as file:
        for data in writes:
            file.write(data)
            shown += _joined(followed.chunks(0.0, space))
            assert shown == b"" or shown.endswith(b"\n"), "an incomplete line"
            assert not followed.has_unread()
    shown += _joined(followed.finish(0.0, space))
    assert shown == _prefixed(b"".join(writes), b"[p]:")
    followed.close()


@pytest.mark.parametrize("length", [1, 10, 100, 2000, 3000, 16 * 1024, 300_000])
def test_lines_of_any_length(tmp_path: Path, length: int) -> None:
    text = b"".join(b"%d" % (number % 10) * (length - 1) + b"\n" for number in range(1 + 600_000 // length)) + b"rest"
    _follow_all(tmp_path / "log", [text], bytearray(READ_SIZE))


@contextmanager
def tailed(folder: Path, content: bytes = b"", prefix: bytes = b"[p]:") -> Iterator[tuple[Tail, FileIO]]:
    """A file with this content, opened for appending, and its tail."""
    path = folder / "log"
    path.write_bytes(content)
    followed = Tail(str(path), prefix)
    with path.open("ab", buffering=0) as file:
        yield followed, file
    followed.close()


def test_long_lines_are_not_copied(tmp_path: Path) -> None:
    space = bytearray(READ_SIZE)
    with tailed(tmp_path, (b"x" * 5000 + b"\n") * 100) as (followed, _):
        for piece in followed.chunks(0.0, space):
            assert all(part == b"[p]:" or (isinstance(part, memoryview) and part.obj is space) for part in piece.parts)


def test_pieces_of_a_long_line(tmp_path: Path) -> None:
    with tailed(tmp_path, b"x" * 1_000_000 + b"\ny\n") as (followed, _):
        chunks = followed.chunks(0.0, bytearray(READ_SIZE))
        pieces = [(piece.ends, piece.size(), b"".join(piece.parts)) for piece in chunks]
    assert [ends for ends, _, _ in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(size for _, size, _ in pieces) <= 300_000
    assert b"".join(data for _, _, data in pieces) == b"[p]:" + b"x" * 1_000_000 + b"\n[p]:y\n"


def test_a_truncated_file(tmp_path: Path) -> None:
    space = bytearray(READ_SIZE)
    with tailed(tmp_path, b"a long line\n") as (followed, file):
        assert _joined(followed.chunks(0.0, space)) == b"[p]:a long line\n"
        file.truncate(0)
        file.write(b"new\n")
        assert _joined(followed.chunks(0.0, space)) == b"[p]:new\n"
        file.truncate(0)
        file.write(b"end")
        assert _joined(followed.finish(0.0, space)) == b"[p]:end\n"


def test_a_progress_bar(tmp_path: Path) -> None:
    space = bytearray(READ_SIZE)
    with tailed(tmp_path) as (followed, file):
        file.write(b"\r10%\r20%")
        assert list(followed.chunks(5.0, space)) == []
        assert followed.unfinished_deadline() == 5.0 + PROGRESS_BAR_DELAY
        assert followed.unfinished_line() == b"[p]:\r10%\r\n"
        assert followed.unfinished_deadline() is None
        file.write(b"\r30%\n")
        assert _joined(followed.chunks(7.0, space)) == b"[p]:20%\r30%\n"
        assert followed.unfinished_deadline() is None


def test_a_prompt(tmp_path: Path) -> None:
    space = bytearray(READ_SIZE)
    with tailed(tmp_path) as (followed, file):
        file.write(b"> x.py(3)f()\n(Pdb")
        assert _joined(followed.chunks(5.0, space)) == b"[p]:> x.py(3)f()\n"
        file.write(b") ")
        assert list(followed.chunks(5.2, space)) == []
        assert followed.unfinished_deadline() == 5.2 + PROMPT_DELAY
        assert followed.unfinished_line() == b"[p]:(Pdb) \n"
        assert followed.unfinished_deadline() is None
        assert list(followed.chunks(6.0, space)) == []
        assert followed.unfinished_deadline() is None, "nothing is shown twice"
        file.write(b"> x.py(4)f()\n(Pdb) ")
        assert _joined(followed.chunks(7.0, space)) == b"[p]:> x.py(4)f()\n"
        assert followed.unfinished_deadline() == 7.0 + PROMPT_DELAY
        assert _joined(followed.finish(8.0, space)) == b"[p]:(Pdb) \n"


def test_a_growing_line(tmp_path: Path) -> None:
    space, waits = bytearray(READ_SIZE), []
    with tailed(tmp_path) as (followed, file):
        for now in (1.0, 2.0, 4.0):
            file.write(b".")
            assert list(followed.chunks(now, space)) == []
            waits.append((followed.unfinished_deadline() or 0.0) - now)
            assert followed.unfinished_line() == b"[p]:.\n"
        assert waits == pytest.approx([PROMPT_DELAY, 4 * PROMPT_DELAY, 16 * PROMPT_DELAY])
        file.write(b"\ndone\n.")
        assert _joined(followed.chunks(9.0, space)) == b"[p]:done\n"
        assert followed.unfinished_deadline() == 9.0 + PROMPT_DELAY


@pytest.mark.parametrize(("end", "is_shown"), [(b"los", False), (b"name? ", True), (b"(Pdb) ", True)])
def test_lines_cut_by_a_buffer_are_no_prompts(tmp_path: Path, end: bytes, is_shown: bool) -> None:
    with tailed(tmp_path, b"loss 2.3\n" * 1000 + end) as (followed, _):
        for _ in followed.chunks(1.0, bytearray(READ_SIZE)):
            pass
        assert (followed.unfinished_deadline() is not None) is is_shown


@example(writes=[b"a", b"\nb\n"], shows=[True] * 12)
@given(writes=WRITES, shows=st.lists(st.booleans(), min_size=12, max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(200))
def test_no_byte_is_lost(tmp_path: Path, writes: list[bytes], shows: list[bool]) -> None:
    (path := tmp_path / "log").write_bytes(b"")
    line_filter = LineFilter(str(tmp_path / "filtered"), [""])
    followed, space, shown = Tail(str(path), b"\0", line_filter), bytearray(40), b""
    with path.open("ab", buffering=0) as file:
        for data, show in zip(writes, shows, strict=False):
            file.write(data)
            shown += _joined(followed.chunks(0.0, space))
            if show and followed.unfinished_deadline() is not None:
                shown += followed.unfinished_line()
    shown += _joined(followed.finish(0.0, space))
    text = b"".join(writes)
    assert shown.translate(None, b"\0\n") == text.replace(b"\n", b"")
    assert (tmp_path / "filtered").read_bytes() == _prefixed(text, b"\0")
    followed.close()
    line_filter.close()
