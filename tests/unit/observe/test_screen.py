"""The live screen."""

from __future__ import annotations

import io
import os
import re

import pytest

from rallypoint.cli.following import JsonLines, Screen, Terminal
from rallypoint.observe.status import cells
from rallypoint.observe.watching.messages import JobPhase, MemberState, Snapshot
from tests.unit.observe.snapshots import LONG, event, node, snapshot


def drawn(seen: Snapshot, width: int = 100, height: int = 40, note: str = "") -> list[str]:
    """The lines on a terminal of this size."""
    out = io.StringIO()
    screen = Screen(Sized(out, width, height))
    screen.note(note)
    screen.show(seen)
    return re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", out.getvalue()).split("\r\n")


class Sized(Terminal):
    def __init__(self, out: io.StringIO, width: int = 80, height: int = 24) -> None:
        super().__init__(out)
        self._size = os.terminal_size((width, height))

    @property
    def size(self) -> os.terminal_size:
        return self._size


def test_content() -> None:
    text = "\n".join(drawn(snapshot(), width=120))
    for words in ("running since", "round     4", "1 failure; 2 left", "2 (min 2, max 4)", "step 7 to 8"):
        assert words in text
    assert re.search(r"0 +n0 .* participant  0-1", text)
    assert "10 11" in text
    assert "Signal 9 (SIGKILL)" in text
    assert "round 4 started" in text


@pytest.mark.parametrize("phase", list(JobPhase))
@pytest.mark.parametrize(("width", "height"), [(40, 10), (40, 24), (60, 24), (80, 50), (200, 60)])
def test_size(phase: JobPhase, width: int, height: int) -> None:
    nodes = tuple(node(number, host=LONG if number % 2 else "日本語ホスト") for number in range(40))
    seen = snapshot(phase, nodes=0, expected=(LONG, LONG), detail=LONG * 2, events=(event(1, LONG * 3),) * 9)
    lines = drawn(seen._replace(nodes=nodes, failures=seen.failures * 9), width, height, "out of reach")
    assert max(map(cells, lines)) <= width
    assert len(lines) <= height, "\n".join(lines)
    assert "out of reach" in lines[-1]


@pytest.mark.parametrize("height", [24, 30, 34])
def test_the_newest_events_are_shown(height: int) -> None:
    seen = snapshot(events=tuple(event(number, f"event {number}") for number in range(9)))
    seen = seen._replace(failures=seen.failures * 9)
    lines = drawn(seen, 100, height)
    assert lines[-1].endswith("event 8")
    assert "last events" in lines


def test_nodes_with_problems_come_first() -> None:
    nodes = [node(number) for number in range(500)]
    nodes[321] = node(321, connected=False)
    nodes += [node(500, state=MemberState.EXPECTED, connected=False)]
    lines = drawn(snapshot(nodes=0)._replace(nodes=tuple(nodes)), 80, 24)
    rows = lines[next(number for number, line in enumerate(lines) if line.startswith("RANK")) + 1 :]
    assert "n321" in rows[0]
    assert "unreachable" in rows[0]
    assert "n500" in rows[1]
    assert any("more nodes" in row for row in rows)


@pytest.mark.parametrize("height", range(18, 40))
def test_unreachable_nodes_come_before_events(height: int) -> None:
    nodes = tuple(node(number, connected=number not in {3, 6, 7}) for number in range(8))
    events = tuple(event(number, "a thing") for number in range(10))
    seen = snapshot(nodes=0, events=events)._replace(nodes=nodes, failures=())
    lines = drawn(seen, 100, height)
    rows = [line for line in lines if re.search(r" n\d ", line)]
    left_out = [int(found[1]) for line in lines if (found := re.match(r"and (\d+) more nodes", line))]
    assert sum("unreachable" in line for line in rows) == 3, lines
    assert len(rows) + sum(left_out) == 8, lines
    assert lines[-1].endswith("a thing")


def test_close() -> None:
    out = io.StringIO()
    screen = Screen(Sized(out))
    screen.close()
    assert out.getvalue() == "", "nothing was changed"
    screen.show(snapshot())
    screen.note("the control plane is out of reach")
    screen.close()
    screen.close()
    text = out.getvalue()
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1
    assert text.count("out of reach") == 1
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is visible again"


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> str:
        out = io.StringIO()
        Screen(Sized(out)).show(snapshot())
        return out.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32mphase     running" in shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*m", shown())
    assert "running" in shown()


def test_changes_and_new_sessions_are_lines() -> None:
    lines: list[str] = []
    shown = JsonLines(lines.append)
    for _ in range(2):
        shown.show(snapshot())
    assert len(lines) == 1
    shown.note("the control plane was lost")
    shown.show(snapshot())  # from another coordinator with the same name and number of changes
    assert len(lines) == 2
