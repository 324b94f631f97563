"""Sends data from this node that a watcher or the investigation of a hang requests, in parts, from a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from rallypoint.base.log import get_logger
from rallypoint.base.side_thread import start_thread
from rallypoint.control.protocol.messages import MAX_PART, CollectedPart, CollectRequested

log = get_logger(__name__)


def start_collecting(
    request: CollectRequested, gather: Callable[[], bytes], send: Callable[[CollectedPart], None]
) -> threading.Thread | None:
    """Gather the data on a thread and send it. If this machine does not allow another thread, report this and return
    None.
    """
    thread = start_thread(partial(_collect, request, gather, send), "collect")
    if thread is None:
        log.warning(
            "the data that rallyctl requested cannot be collected: this machine does not allow any more threads"
        )
        send(CollectedPart(request.number, b"", True))
    return thread


def _collect(request: CollectRequested, gather: Callable[[], bytes], send: Callable[[CollectedPart], None]) -> None:
    try:
        data = gather()
    except Exception:
        log.exception("the data that rallyctl requested could not be collected")
        data = b""
    cuts = range(0, max(1, len(data)), MAX_PART)
    for at in cuts:
        part, is_last = data[at : at + MAX_PART], at + MAX_PART >= len(data)
        send(CollectedPart(request.number, part, is_last, is_first=at == 0))
