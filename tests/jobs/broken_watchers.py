"""`rallyrun`, in which something that only watches the job is broken:

    python -m tests.jobs.broken_watchers FAULT WATCHER RECORD ARGUMENTS...

WATCHER is the name of one, or `*` for all. The names come from the product: whatever passes `guarded`, is posted to a
`SideThread`, or runs on a thread of its own (`start_thread`) is a watcher, and is written to the file RECORD when it is
first used.
"""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Callable
from typing import Any

from rallypoint.base import side_thread
from rallypoint.base.side_thread import SideThread

HANG = 60.0
ON_LOOP, BESIDE = "on the loop", "beside it"


def _raise() -> None:
    raise RuntimeError("broken by a test")


def _without_descriptors() -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def _unencodable() -> None:
    "\udcff".encode()


def _hang() -> None:
    threading.Event().wait(HANG)


NO_THREAD = "no thread"
FAULTS: dict[str, Callable[[], None]] = {
    "exception": _raise,
    "no descriptor": _without_descriptors,
    "unencodable": _unencodable,
    "hang": _hang,
    NO_THREAD: lambda: None,
}
"""What a watcher does instead of its work."""
NOT_ON_LOOP = frozenset({"hang", NO_THREAD})
"""Faults that a watcher on the loop's thread cannot have: it looks at memory alone (law 2 of `agent/sources.py`), and
whatever may wait is posted to a thread, which is a watcher of its own here.
"""


def break_watchers(fault: str, watcher: str, record: str) -> None:
    """Break them, before anything else of the product is imported."""
    seen: set[str] = set()

    def is_broken(name: str, where: str) -> bool:
        if name not in seen:
            seen.add(name)
            with open(record, "a") as file:
                file.write(f"{where}: {name}\n")
        return watcher in {"*", name}

    post, start, start_thread = SideThread.post, SideThread._start, side_thread.start_thread

    def broken_post(thread: SideThread, what: str, run: Callable[[], object]) -> bool:
        breaks = is_broken(f"{thread._name}: {what}", BESIDE) and fault != NO_THREAD
        return post(thread, what, FAULTS[fault] if breaks else run)

    def broken_start(thread: SideThread) -> None:
        if not (is_broken(thread._name, BESIDE) and fault == NO_THREAD):
            start(thread)

    def broken_thread(run: Callable[[], object], name: str) -> threading.Thread | None:
        if not is_broken(name, BESIDE):
            return start_thread(run, name)
        return None if fault == NO_THREAD else start_thread(FAULTS[fault], name)

    SideThread.post = broken_post  # type: ignore[method-assign,assignment]
    SideThread._start = broken_start  # type: ignore[method-assign,assignment]
    side_thread.start_thread = broken_thread
    from rallypoint.agent import sources

    guarded = sources.guarded

    def broken_guard(what: str, call: Callable[..., object], *args: Any, **more: Any) -> bool:
        breaks = is_broken(what, ON_LOOP) and fault not in NOT_ON_LOOP
        return guarded(what, FAULTS[fault]) if breaks else guarded(what, call, *args, **more)

    sources.guarded = broken_guard


if __name__ == "__main__":
    break_watchers(*sys.argv[1:4])
    sys.argv = ["rallyrun", *sys.argv[4:]]
    from rallypoint.cli.rallyrun import main

    sys.exit(main())
