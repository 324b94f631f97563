"""The demo on a terminal: what is drawn of what is known."""

from __future__ import annotations

import re

import pyte
import pytest

from rallypoint.demo.screen import Known, Part, drawn, frame, redrawing
from rallypoint.demo.track import Track, finished, given_up, killed, told


def text(track: Track, now: float, width: int = 79, summary: tuple[str, ...] = ()) -> list[str]:
    known = Known((Part("One worker is killed.", (track,)),), "rallyrun --standalone", "  4.00 s  SIGKILL", summary)
    return drawn(frame(known, now), width, colours=False)


def at(step: int) -> Track:
    return told(Track("rallyrun", 120), {"event": "step", "rank": 0, "pid": 7, "step": step}, 3.0)


def test_the_bar_goes_with_the_steps_and_keeps_the_place_of_the_kill() -> None:
    row = text(at(60), 3.0)[3]
    assert row == f"  rallyrun {'━' * 12}{'─' * 12}  60/120 training"
    gone_on = killed(at(60), 4.0)._replace(phase=at(90).phase, step=90, stopped=0.25)
    assert text(gone_on, 5.0)[3] == f"  rallyrun {'━' * 12}✗{'━' * 5}{'─' * 6}  90/120 went on after 0.25 s"


def test_while_nothing_goes_on_the_time_is_counted() -> None:
    broken = killed(at(65), 4.0)
    assert text(broken, 16.34)[3].endswith("no step for 12.3 s")
    assert text(given_up(broken, "", 64.0), 99.0)[3].endswith("no step for 60 s, given up")


def test_the_command_and_what_happened_last_give_way_to_the_summary() -> None:
    done = finished(at(120), 5.0)
    assert text(done, 5.0)[-2:] == ["$ rallyrun --standalone", "  4.00 s  SIGKILL"]
    assert text(done, 5.0, summary=("the end",))[-1] == "the end"


def test_no_line_is_wider_than_the_terminal_nor_is_a_colour_left_on() -> None:
    for width in (20, 45, 60, 200):
        for colours in (False, True):
            known = Known((Part("p" * 70, (killed(at(65), 4.0),)),), "c" * 90, "l" * 90)
            lines = drawn(frame(known, 9.0), width, colours)
            assert all(len(re.sub(r"\x1b\[[\d;]*m", "", line)) <= width for line in lines)
            assert all(len(re.findall(r"\x1b\[[1-9]", line)) == line.count("\x1b[0m") for line in lines)
            assert any("\x1b[" in line for line in lines) == colours


@pytest.mark.parametrize(("before", "after"), [([], ["a", "b"]), (["a", "b"], ["a", "c", "d"]), (["a", "b"], ["x"])])
def test_a_frame_takes_the_place_of_the_one_before(before: list[str], after: list[str]) -> None:
    screen = pyte.Screen(20, 10)
    screen.set_mode(pyte.modes.LNM)
    stream = pyte.Stream(screen)
    stream.feed("prompt\n" + redrawing([], before) + redrawing(before, after))
    assert [line.rstrip() for line in screen.display if line.strip()] == ["prompt", *after]
    assert screen.cursor.y == 1 + len(after)
