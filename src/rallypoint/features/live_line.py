"""The status line of a waiting agent, rewritten in place if standard error is a terminal.

Laws:

1. Other writers first erase it (`base.stderr.OutputLock`), so that their lines do not mix with it.
2. It never waits for a blocked terminal; the line is skipped instead.
3. A shell's background job draws nothing.
4. If it cannot be drawn, the log has its content.
"""

from __future__ import annotations

import math
import os
import select
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from rallypoint.agent.feature import Agent, Feature
from rallypoint.agent.policy import Phase, PolicyState
from rallypoint.agent.sources import Source, guarded
from rallypoint.agent.steps import FeatureStep
from rallypoint.base.light_dataclasses import dataclass
from rallypoint.base.log import terminal_rewrites_lines
from rallypoint.base.stderr import ERASE_LINE, STDERR_LOCK, draw
from rallypoint.control.protocol.messages import ProgressRequest, ProgressText

if TYPE_CHECKING:
    from rallypoint.agent.policy import Decision, Rules
    from rallypoint.agent.steps import Event, Step

_STDERR = 2
_LOCK_TIMEOUT = 0.1
"""Seconds to wait for other writers before skipping the line."""
_LEAST_WIDTH = 20
_EVERY = 1.0
"""Seconds between redraws, and between requests to the coordinator for missing nodes."""


@dataclass(frozen=True, slots=True)
class ShowLine(FeatureStep):
    """Show these texts with the elapsed time between them."""

    texts: tuple[str, str]


class WaitingLine(Feature, Source):
    """Shows the wait in one live line, instead of logging each change."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._can_draw = shows_live_line()
        self._line: LiveLine | None = None
        self._draw_at = math.inf
        self._stops_workers = False

    def watchers(self) -> Iterable[Source]:
        return (self,)

    def rules(self) -> Rules:
        return {ProgressText: _show} if self._can_draw else {}

    def steps(self) -> Mapping[type, Callable[[Any], object]]:
        return {ShowLine: lambda step: guarded("showing the live line", self._show, step)}

    def observe(self, before: PolicyState, event: Event | None, after: PolicyState, steps: tuple[Step, ...]) -> None:
        self._stops_workers = bool(after.stopping)
        if before.phase is Phase.FORMING and after.phase is not Phase.FORMING:
            self.close()  # before workers start, since they may write to the same terminal

    def close(self) -> None:
        line, self._line, self._draw_at = self._line, None, math.inf
        if line is not None:
            line.end()

    def wake_at(self) -> float:
        return self._draw_at

    def step(self) -> None:
        now = self.agent.clock.monotonic()
        if self._line is None or now < self._draw_at:
            return
        self._draw_at = now + _EVERY
        self._line.redraw(now)
        if not self._stops_workers:  # otherwise this node is waiting for its own workers
            self.workers.rendezvous.send(ProgressRequest())

    def _show(self, step: ShowLine) -> None:
        now = self.agent.clock.monotonic()
        if self._line is None:
            self._line = LiveLine(self.workers.group.join_requested_at)
            self._draw_at = now + _EVERY
        self._line.show(step.texts, now)


def _show(status: PolicyState, event: ProgressText) -> Decision | None:
    if status.phase is not Phase.FORMING or status.stopping or not event.live[0]:
        return None
    return status, (ShowLine(event.live),)


def shows_live_line() -> bool:
    """Whether standard error is a terminal on which a line can be rewritten."""
    return os.isatty(_STDERR) and terminal_rewrites_lines()


class LiveLine:
    """One line, from `show` until `end`."""

    def __init__(self, since: float) -> None:
        """Show nothing yet.

        Args:
            since: when the elapsed time started, on the clock of the other methods' `now`.
        """
        self._since = since
        self._words = ("", "")
        self._shown = False

    def show(self, words: tuple[str, str], now: float) -> None:
        """Show the elapsed time between these two texts."""
        self._words = words
        self.redraw(now)

    def redraw(self, now: float) -> None:
        """Show the same texts with the current elapsed time."""
        if self._words[0]:
            self._shown = True
            draw(partial(_write, composed(self._words, now - self._since, _width())), needed=False)

    def end(self) -> None:
        """Erase the line. Idempotent."""
        self._words = ("", "")
        if self._shown:
            self._shown = False
            draw(_erase)


def composed(words: tuple[str, str], seconds: float, width: int) -> str:
    """Compose the line in at most `width` columns."""
    before, after = words
    text = f"{before}, {_elapsed(seconds)}{f', {after}' if after else ''}"
    most = max(_LEAST_WIDTH, width - 1)  # a terminal wraps after its last column
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _elapsed(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min {whole % 60} s"


def _width() -> int:
    try:
        return os.get_terminal_size(_STDERR).columns or 80
    except OSError:
        return 80


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(_STDERR) == os.getpgrp()
    except OSError:  # a terminal in another session has no jobs
        return True


def _erase() -> None:
    if STDERR_LOCK.shows_live_line:
        _write("")


def _write(text: str) -> None:
    """Replace the line with this text, or erase it if empty."""
    if not _in_foreground():
        return
    writable = select.poll()
    writable.register(_STDERR, select.POLLOUT)
    if not writable.poll(0):
        return
    with STDERR_LOCK.hold(_LOCK_TIMEOUT), suppress(OSError):
        begun = "\n" if STDERR_LOCK.line_unfinished and text else ERASE_LINE
        os.write(_STDERR, f"{begun}{text}".encode())
        if text:
            STDERR_LOCK.line_unfinished = False
        STDERR_LOCK.shows_live_line = bool(text)
