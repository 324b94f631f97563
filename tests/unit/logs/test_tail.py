"""Following a file: against a twin that splits the whole text, however the writes fall."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rallypoint.logs import tail as module
from rallypoint.logs.tail import BAR_PATIENCE, Tail

WRITES = st.lists(st.binary(max_size=30).map(lambda data: data.replace(b"\x00", b"\n")), max_size=12)


def _twin(text: bytes, prefix: bytes) -> bytes:
    """Every line with its prefix, the last one ended."""
    lines = text.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return b"".join(prefix + line + b"\n" for line in lines)


@given(writes=WRITES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_lines_come_whole_and_prefixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: list[bytes]) -> None:
    monkeypatch.setattr(module, "_CHUNK", 7)  # so that lines are longer than a chunk
    path = tmp_path / "log"
    path.write_bytes(b"")
    followed = Tail(str(path), b"[p]:")
    shown = b""
    with path.open("ab", buffering=0) as file:
        for data in writes:
            file.write(data)
            shown += b"".join(followed.pieces(0.0))
            assert shown == b"" or shown.endswith(b"\n"), "half a line was shown"
            assert not followed.behind()
    shown += b"".join(followed.finish(0.0))
    assert shown == _twin(b"".join(writes), b"[p]:")
    followed.close()


def test_only_the_last_piece_of_a_line_ends_with_a_newline(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 1_000_000 + b"\ny\n")
    followed = Tail(str(path), b"[p]:")
    pieces = list(followed.pieces(0.0))
    assert [piece.endswith(b"\n") for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(map(len, pieces)) <= 300_000
    assert b"".join(pieces) == b"[p]:" + b"x" * 1_000_000 + b"\n[p]:y\n"
    followed.close()


def test_an_emptied_file_is_followed_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a long line\n")
    followed = Tail(str(path), b"")
    assert b"".join(followed.pieces(0.0)) == b"a long line\n"
    os.truncate(path, 0)
    with path.open("ab") as file:
        file.write(b"new\n")
    assert b"".join(followed.pieces(0.0)) == b"new\n"
    followed.close()


def test_a_progress_bar_is_shown_after_a_while_and_nothing_of_it_twice(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"")
    followed = Tail(str(path), b"[p]:")
    with path.open("ab", buffering=0) as file:
        file.write(b"\r10%\r20%")
        assert list(followed.pieces(5.0)) == []
        assert followed.bar_deadline() == 5.0 + BAR_PATIENCE
        assert followed.bar() == b"[p]:\r10%\r\n"
        assert followed.bar_deadline() is None
        file.write(b"\r30%\n")
        assert b"".join(followed.pieces(7.0)) == b"[p]:20%\r30%\n"
        assert followed.bar_deadline() is None
    followed.close()
