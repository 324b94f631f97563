"""Waits for a round, for callers that poll a handler instead of listening to it as an agent does."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.protocol.messages import ConfigDiffers, Notification, ProgressText
from rallypoint.rendezvous.control_plane import FIRST_PROGRESS_REQUEST, MAX_PROGRESS_INTERVAL
from rallypoint.rendezvous.handler import RendezvousInfo

if TYPE_CHECKING:
    from rallypoint.store.api import Store

log = get_logger(__name__)


def incoming_notifications(
    inbox: queue.SimpleQueue[Notification], ask_progress: Callable[[], None]
) -> Iterator[Notification]:
    """Notifications that arrive during a wait for a round, endlessly; if none arrives for long, requests progress."""
    interval = FIRST_PROGRESS_REQUEST
    ask_at = SYSTEM_CLOCK.monotonic() + interval
    while True:
        try:
            notification = inbox.get(timeout=max(0.0, ask_at - SYSTEM_CLOCK.monotonic()))
        except queue.Empty:
            interval = min(2 * interval, MAX_PROGRESS_INTERVAL)
            ask_at = SYSTEM_CLOCK.monotonic() + interval
            ask_progress()
        else:
            yield notification


def log_for_people(notification: Notification) -> None:
    """Log what a notification says to people, where no agent does."""
    if isinstance(notification, ProgressText):
        (log.warning if notification.warning else log.info)("%s", notification.text)
    if isinstance(notification, ConfigDiffers):
        for each in notification.differences:
            log.warning("%s; give all nodes of a job the same", each.sentence("this node"))


def with_torch_store(info: RendezvousInfo) -> RendezvousInfo:
    """The same for a polling caller: if torch is imported, the store is one that torch's functions accept."""

    def store() -> Store:
        from rallypoint.store.torch_adapter import if_torch_is_imported

        made: Store = if_torch_is_imported(info.store)
        return made

    return RendezvousInfo(store, info.rank, info.world_size, info.bootstrap_store_info)
