"""Our own lines on standard error: whole, and never in the middle of a worker's."""

from __future__ import annotations

import os

import pytest

from rallypoint.base.log import STDERR_LOCK, OutputLock, print_error_line
from rallypoint.logs.console import ConsoleSink


def test_a_line_that_a_worker_has_begun_is_not_continued(capsys: pytest.CaptureFixture[str]) -> None:
    STDERR_LOCK.line_unfinished = True
    print_error_line("ours")
    print_error_line("ours again")
    assert capsys.readouterr().err == "\nours\nours again\n"


@pytest.mark.parametrize(("written", "begun"), [([b"half"], True), ([b"half", b" a line\n"], False), ([b"\n"], False)])
def test_whether_a_line_has_been_begun_is_known_from_what_was_shown(written: list[bytes], begun: bool) -> None:
    reading, writing = os.pipe()
    turn = OutputLock()
    place = ConsoleSink(writing, lock=turn)
    for each in written:
        place.open_stream(0).write(each)
    assert turn.line_unfinished is begun
    place.close()
    assert os.read(reading, 100) == b"".join(written)
    os.close(reading)
