"""The state of a job, as a terminal screen that is redrawn after each change. The only module that imports `rich`.

A screen shows times of day, and not for how long: so nothing on it is wrong while nothing changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rallypoint.observe.change_lines import clock_time
from rallypoint.observe.status_text import failure_text, node_state, rank_range, restarts_sentence
from rallypoint.protocol.observation import NodeState, NodeView, Phase, Snapshot

_STYLES = {
    Phase.WAITING: "yellow",
    Phase.FORMING: "yellow",
    Phase.HELD_BACK: "yellow",
    Phase.RUNNING: "green",
    Phase.SUCCEEDED: "bold green",
    Phase.FAILED: "bold red",
    Phase.STOPPED: "bold red",
}
_NODE_STYLES = {"unreachable": "red", "expected": "yellow", "waiting": "yellow", "spare": "dim", "succeeded": "green"}
_FAILURES, _EVENTS = 3, 6
"""How many of the newest are shown at most, and the half of it where the terminal is low."""
_LEAST_NODES = 3
"""Rows of nodes that are shown however low the terminal is."""
_BAR = 24


class Screen:
    """Takes the terminal from the first snapshot until `close`."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._live: Live | None = None
        self._snapshot: Snapshot | None = None
        self._at = 0.0
        self._note = ""

    def show(self, snapshot: Snapshot) -> None:
        """The job stands so now."""
        self._snapshot, self._at = snapshot, time.time()
        self.redraw()

    def note(self, text: str) -> None:
        """Something to be said of the screen itself, such as that it is not up to date; empty for nothing."""
        self._note = text
        self.redraw()

    def redraw(self) -> None:
        """Show the same again, in the size that the terminal has now."""
        if self._snapshot is None:
            return
        drawn = drawing(self._snapshot, self._at, self.console.size.width, self.console.size.height, self._note)
        if self._live is None:
            self._live = Live(drawn, console=self.console, auto_refresh=False, screen=True)
            self._live.start(refresh=True)
        else:
            self._live.update(drawn, refresh=True)

    def close(self) -> None:
        """Give the terminal back as it was. Idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def drawing(snapshot: Snapshot, now: float, width: int, height: int, note: str = "") -> RenderableType:
    """The contents of the screen.

    Args:
        snapshot: of the job.
        now: the time of day at which the snapshot came, in seconds since 1970.
        width: columns of the terminal.
        height: its lines.
        note: the last line, if any.
    """
    low = height < 30
    head = [_line(text, style) for text, style in _head(snapshot, now)]
    failures = [
        _line(f"{clock_time(now - each.seconds_ago)} {failure_text(each)}", "red")
        for each in snapshot.failures[-(_FAILURES // 2 if low else _FAILURES) :]
    ]
    events = [
        _line(f"{clock_time(now - each.seconds_ago)} {each.text}")
        for each in snapshot.events[-(_EVENTS // 2 if low else _EVENTS) :]
    ]
    below: list[RenderableType] = [*_titled("last failures", failures), *_titled("last events", events)]
    if note:
        below.append(_line(note, "bold yellow"))
    # Its header, the line that says how many more there are, and the bar.
    rows = max(_LEAST_NODES, height - len(head) - len(below) - 4)
    return Group(*head, _bar(snapshot, width), "", *_nodes(snapshot, now, width, rows), *below)


def _line(text: str, style: str = "") -> Text:
    """A text that stays on one line, whatever stands in it."""
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _titled(title: str, lines: list[Text]) -> list[RenderableType]:
    return ["", _line(title, "bold"), *lines] if lines else []


def _head(snapshot: Snapshot, now: float) -> Iterator[tuple[str, str]]:
    yield f"job {snapshot.job}", "bold"
    since = clock_time(now - snapshot.phase_for)
    what = f": {snapshot.detail}" if snapshot.detail else ""
    if snapshot.phase is Phase.HELD_BACK:
        what = f", next round at {clock_time(now + snapshot.backoff)}"
    elif snapshot.phase is Phase.WAITING:
        who = f" ({', '.join(snapshot.expected)})" if snapshot.expected else ""
        what = f", missing {snapshot.missing}{who}"
    yield f"{snapshot.phase.value} since {since}{what}", _STYLES[snapshot.phase]
    yield f"round {snapshot.round}, restarts: {restarts_sentence(snapshot)}", ""
    steps = [each.report.progress for each in snapshot.nodes if each.report is not None and each.report.progress >= 0]
    if steps:
        yield f"step {min(steps)}" + (f" to {max(steps)}" if max(steps) != min(steps) else ""), ""


def _bar(snapshot: Snapshot, width: int) -> RenderableType:
    """How many of the nodes are in that a round has at most."""
    least, most = snapshot.min_nodes, snapshot.max_nodes
    count = sum(each.state is NodeState.PARTICIPANT for each in snapshot.nodes)
    spare = sum(each.state in (NodeState.SPARE, NodeState.WAITING) for each in snapshot.nodes)
    of = str(most) if least == most else f"{least} to {most}"
    text = f"{count} of {of} nodes{f', {spare} more' if spare else ''}"
    row = Table.grid(padding=(0, 1))
    style = "green" if count >= least else "yellow"
    bar = ProgressBar(total=most, completed=min(count, most), width=max(8, min(_BAR, width - len(text) - 2)))
    bar.complete_style = bar.finished_style = style
    row.add_row(bar, _line(text))
    return row


def _nodes(snapshot: Snapshot, now: float, width: int, rows: int) -> list[RenderableType]:
    if not snapshot.nodes:
        return [_line("no nodes")]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    columns = [each for each in _COLUMNS if width >= each[1]]
    for title, _, _ in columns:
        table.add_column(title, no_wrap=True, overflow="ellipsis")
    # Where there is no room for all, those come first with whom something is the matter.
    shown = list(snapshot.nodes)
    if len(shown) > rows:
        shown.sort(key=_is_well)
    for node in shown[:rows]:
        cells = (Text(text(node, now)) for _, _, text in columns)
        table.add_row(*cells, style=_NODE_STYLES.get(node_state(node), ""))
    more = len(shown) - rows
    return [table, *([_line(f"and {more} more nodes", "dim")] if more > 0 else [])]


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
