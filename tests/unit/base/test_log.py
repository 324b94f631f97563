"""Our own lines on standard error: whole, and never in the middle of a worker's."""

from __future__ import annotations

import os

import pytest

from rallypoint.base.log import STDERR_TURN, Turn, say
from rallypoint.logs.console import Place


def test_a_line_that_a_worker_has_begun_is_not_gone_on_with(capsys: pytest.CaptureFixture[str]) -> None:
    STDERR_TURN.in_line = True
    say("ours")
    say("ours again")
    assert capsys.readouterr().err == "\nours\nours again\n"


@pytest.mark.parametrize(("written", "begun"), [([b"half"], True), ([b"half", b" a line\n"], False), ([b"\n"], False)])
def test_whether_a_line_has_been_begun_is_known_from_what_was_shown(written: list[bytes], begun: bool) -> None:
    reading, writing = os.pipe()
    turn = Turn()
    place = Place(writing, turn=turn)
    for each in written:
        place.show(0).write(each)
    assert turn.in_line is begun
    place.close()
    assert os.read(reading, 100) == b"".join(written)
    os.close(reading)
