"""A terminal whose contents are redrawn after each change, and what it shows of a job: `rallyctl status --watch`.

Laws:

1. `drawing` is pure: what is known and the time in, lines out. It shows times of day, and not for how long: so nothing
   on the screen is wrong while nothing changes.
2. No line is wider than the terminal, and no more lines are drawn than it has.
3. The terminal is given back as it was.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TextIO

from rallypoint.observe.status import cells, clock_time, failure_text, node_state, rank_range, restarts_sentence, table
from rallypoint.protocol.observation import NodeState, NodeView, Phase, Snapshot

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "success": "1;32", "failure": "1;31"}
_STYLES = {
    Phase.WAITING: "yellow",
    Phase.FORMING: "yellow",
    Phase.HELD_BACK: "yellow",
    Phase.RUNNING: "green",
    Phase.SUCCEEDED: "success",
    Phase.FAILED: "failure",
    Phase.STOPPED: "failure",
}
_NODE_STYLES = {"unreachable": "red", "expected": "yellow", "waiting": "yellow", "spare": "dim", "succeeded": "green"}
_FAILURES, _EVENTS = 3, 6
"""How many of the newest are shown at most, and the half of it where the terminal is low."""
_LEAST_NODES = 3
"""Rows of nodes that are shown however low the terminal is."""
_BAR = 24
_TAKE, _GIVE_BACK = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""To the alternate screen without a cursor, and back."""


class Line(NamedTuple):
    """A line, and the style of all of it: a key of `_CODES`, or nothing."""

    text: str
    style: str = ""


class Terminal:
    """The whole of a terminal, from the first drawing until `close`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._taken = False

    @property
    def size(self) -> os.terminal_size:
        try:
            return os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            return os.terminal_size((80, 24))

    def draw(self, lines: Sequence[Line]) -> None:
        width, height = self.size
        colours = "NO_COLOR" not in os.environ
        shown = [_styled(_cut(each.text, width), each.style if colours else "") for each in lines[:height]]
        self._write(("" if self._taken else _TAKE) + "\x1b[H" + "\x1b[K\r\n".join(shown) + "\x1b[K\x1b[J")
        self._taken = True

    def close(self) -> None:
        """Give the terminal back. Idempotent."""
        if self._taken:
            self._taken = False
            self._write(_GIVE_BACK)

    def _write(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()


def _styled(text: str, style: str) -> str:
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if style else text


def _cut(text: str, width: int) -> str:
    if cells(text) <= width:
        return text
    while text and cells(text) >= width:
        text = text[: -max(1, (cells(text) - width) // 2)]
    return f"{text}…"


class Screen:
    def __init__(self, terminal: Terminal | None = None) -> None:
        self._terminal = terminal or Terminal()
        self._snapshot: Snapshot | None = None
        self._at = 0.0
        self._note = ""

    def show(self, snapshot: Snapshot) -> None:
        self._snapshot, self._at = snapshot, time.time()
        self.redraw()

    def note(self, text: str) -> None:
        """Something to be said of the screen itself, such as that it is not up to date; empty for nothing."""
        self._note = text
        self.redraw()

    def redraw(self) -> None:
        if self._snapshot is not None:
            self._terminal.draw(drawing(self._snapshot, self._at, *self._terminal.size, self._note))

    def close(self) -> None:
        """Give the terminal back as it was. Idempotent."""
        self._terminal.close()


def drawing(snapshot: Snapshot, now: float, width: int, height: int, note: str = "") -> list[Line]:
    """The contents of the screen.

    Args:
        snapshot: of the job.
        now: the time of day at which the snapshot came, in seconds since 1970.
        width: columns of the terminal.
        height: its lines.
        note: the last line, if any.
    """
    low = height < 30
    failures = [
        Line(f"{clock_time(now - each.seconds_ago)} {failure_text(each)}", "red")
        for each in snapshot.failures[-(_FAILURES // 2 if low else _FAILURES) :]
    ]
    events = [
        Line(f"{clock_time(now - each.seconds_ago)} {each.text}")
        for each in snapshot.events[-(_EVENTS // 2 if low else _EVENTS) :]
    ]
    head = [*_head(snapshot, now), _bar(snapshot), Line("")]
    below = [*_titled("last failures", failures), *_titled("last events", events)]
    below += [Line(note, "yellow")] if note else []
    rows = max(_LEAST_NODES, height - len(head) - len(below) - 2)  # the header, and how many more there are
    return [*head, *_nodes(snapshot, now, width, rows), *below]


def _titled(title: str, lines: list[Line]) -> list[Line]:
    return [Line(""), Line(title, "bold"), *lines] if lines else []


def _head(snapshot: Snapshot, now: float) -> Iterator[Line]:
    yield Line(f"job {snapshot.job}", "bold")
    since = clock_time(now - snapshot.phase_for)
    what = f": {snapshot.detail}" if snapshot.detail else ""
    if snapshot.phase is Phase.HELD_BACK:
        what = f", next round at {clock_time(now + snapshot.backoff)}"
    elif snapshot.phase is Phase.WAITING:
        who = f" ({', '.join(snapshot.expected)})" if snapshot.expected else ""
        what = f", missing {snapshot.missing}{who}"
    yield Line(f"{snapshot.phase.value} since {since}{what}", _STYLES[snapshot.phase])
    yield Line(f"round {snapshot.round}, restarts: {restarts_sentence(snapshot)}")
    steps = [each.report.progress for each in snapshot.nodes if each.report is not None and each.report.progress >= 0]
    if steps:
        yield Line(f"step {min(steps)}" + (f" to {max(steps)}" if max(steps) != min(steps) else ""))


def _bar(snapshot: Snapshot) -> Line:
    """How many of the nodes are in that a round has at most."""
    least, most = snapshot.min_nodes, snapshot.max_nodes
    count = sum(each.state is NodeState.PARTICIPANT for each in snapshot.nodes)
    spare = sum(each.state in (NodeState.SPARE, NodeState.WAITING) for each in snapshot.nodes)
    of = str(most) if least == most else f"{least} to {most}"
    done = _BAR * min(count, most) // most
    text = f"{'━' * done}{'─' * (_BAR - done)} {count} of {of} nodes{f', {spare} more' if spare else ''}"
    return Line(text, "green" if count >= least else "yellow")


def _nodes(snapshot: Snapshot, now: float, width: int, rows: int) -> list[Line]:
    if not snapshot.nodes:
        return [Line("no nodes")]
    columns = [each for each in _COLUMNS if width >= each[1]]
    # Where there is no room for all, those come first with whom something is the matter.
    shown = list(snapshot.nodes)
    if len(shown) > rows:
        shown.sort(key=_is_well)
    more, shown = len(shown) - rows, shown[:rows]
    rows_of = ([text(node, now) for _, _, text in columns] for node in shown)
    title, *texts = table([[name for name, _, _ in columns], *rows_of])
    lines = [Line(text, _NODE_STYLES.get(node_state(node), "")) for text, node in zip(texts, shown, strict=True)]
    return [Line(title, "bold"), *lines, *([Line(f"and {more} more nodes", "dim")] if more > 0 else [])]


def _is_well(node: NodeView) -> bool:
    return node.state is NodeState.PARTICIPANT and node.connected


def _heard(node: NodeView, now: float) -> str:
    return "-" if node.silent_for < 0 else clock_time(now - node.silent_for)


def _pids(node: NodeView, _now: float) -> str:
    return "-" if node.report is None or not node.report.pids else " ".join(map(str, node.report.pids))


_COLUMNS: tuple[tuple[str, int, Callable[[NodeView, float], str]], ...] = (
    ("RANK", 0, lambda node, _now: "-" if node.group_rank < 0 else str(node.group_rank)),
    ("NODE", 0, lambda node, _now: node.host or node.name),
    ("STATE", 0, lambda node, _now: node_state(node)),
    ("RANKS", 0, lambda node, _now: rank_range(node)),
    ("ADDRESS", 60, lambda node, _now: node.address),
    ("HEARD", 80, _heard),
    ("PIDS", 100, _pids),
)
"""Titles, from how many columns of the terminal on each is shown, and what stands in it."""
