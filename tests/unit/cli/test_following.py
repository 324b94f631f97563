"""Commands that follow a job, as lines."""

from __future__ import annotations

from rallypoint.cli.following import JsonLines
from tests.unit.observe.snapshots import snapshot


def test_each_change_is_one_line_and_the_first_state_of_a_new_session_too() -> None:
    lines: list[str] = []
    shown = JsonLines(lines.append)
    for _ in range(2):
        shown.show(snapshot())
    assert len(lines) == 1
    shown.note("the control plane was lost")
    shown.show(snapshot())  # of a coordinator that has the same name, and has counted as many changes
    assert len(lines) == 2
