"""What the live screen shows fits the terminal, and says what is so."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from rallypoint.observe.screen import Screen, drawing
from rallypoint.protocol.observation import NodeState, Phase, Snapshot
from tests.unit.observe.snapshots import LONG, event, node, snapshot


def drawn(seen: Snapshot, width: int = 100, height: int = 40, note: str = "") -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(drawing(seen, 1e9, width, height, note))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_screen_says_how_the_job_stands() -> None:
    text = "\n".join(drawn(snapshot(), width=120))
    for words in ("job job", "running since", "round 4", "1 failure; 2 left", "2 of 2 to 4 nodes", "step 7 to 8"):
        assert words in text
    assert "0     n0    participant  0-1" in text
    assert "10 11" in text
    assert "Signal 9 (SIGKILL)" in text
    assert "round 4 started" in text


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize(("width", "height"), [(40, 10), (40, 24), (60, 24), (80, 50), (200, 60)])
def test_a_screen_fits_the_terminal(phase: Phase, width: int, height: int) -> None:
    nodes = tuple(node(number, host=LONG if number % 2 else "日本語ホスト") for number in range(40))
    seen = snapshot(phase, nodes=0, expected=(LONG, LONG), detail=LONG * 2, events=(event(1, LONG * 3),) * 9)
    lines = drawn(seen._replace(nodes=nodes, failures=seen.failures * 9), width, height, "out of reach")
    assert max(map(cell_len, lines)) <= width
    if height >= 24:
        assert len(lines) <= height, "\n".join(lines)
        assert "out of reach" in lines[-1]


def test_of_many_nodes_those_come_first_with_whom_something_is_the_matter() -> None:
    nodes = [node(number) for number in range(500)]
    nodes[321] = node(321, connected=False)
    nodes += [node(500, state=NodeState.EXPECTED, connected=False)]
    lines = drawn(snapshot(nodes=0)._replace(nodes=tuple(nodes)), 80, 24)
    rows = lines[next(number for number, line in enumerate(lines) if line.startswith("RANK")) + 1 :]
    assert "n321" in rows[0]
    assert "unreachable" in rows[0]
    assert "n500" in rows[1]
    assert any("more nodes" in each for each in rows)


def test_a_screen_gives_the_terminal_back() -> None:
    out = io.StringIO()
    screen = Screen(Console(file=out, force_terminal=True, width=80, height=24, _environ={"TERM": "xterm"}))
    screen.close()
    assert out.getvalue() == "", "nothing was taken"
    screen.show(snapshot())
    screen.note("the control plane is out of reach")
    screen.close()
    screen.close()
    text = out.getvalue()
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1
    assert text.count("out of reach") == 1
    assert text.rstrip("\n").endswith("\x1b[?25h") or "\x1b[?25h" in text, "the cursor is visible again"


def test_no_colour_where_it_is_not_wanted() -> None:
    def shown(environment: dict[str, str]) -> str:
        out = io.StringIO()
        console = Console(file=out, force_terminal=True, width=80, height=24, _environ={"TERM": "xterm"} | environment)
        screen = Screen(console)
        screen.show(snapshot())
        screen.close()
        return out.getvalue()

    assert "\x1b[32m" in shown({}) or "\x1b[1;32m" in shown({})
    without = shown({"NO_COLOR": "1"})
    assert not any(f"\x1b[{code}m" in without for code in (31, 32, 33, "1;31", "1;32"))
    assert "running" in without
