"""The extensions of the coordinator, one row per extension. Cheap to import: an extension is imported on first use
(`control.coordinator.extension`).
"""

from __future__ import annotations

from rallypoint.base.light_typing import Any
from rallypoint.control.coordinator.extensions import ExtensionRow, load
from rallypoint.observe.watching import WATCHERS

EXTENSIONS = (
    ExtensionRow(WATCHERS, "rallypoint.observe.watching.watchers:WatcherSessions"),
    ExtensionRow("hangs", "rallypoint.observe.watching.hang:HangExtension", needed="quiet"),
    ExtensionRow(
        "causes", "rallypoint.observe.watching.cause_search:CauseExtension", hears=("CauseSought", "CauseClues")
    ),
    ExtensionRow("confirmations", "rallypoint.features.confirmations:Confirmations", hears=("ConfirmRequest",)),
    ExtensionRow(
        "job log",
        "rallypoint.observe.rendezvous_log:JobLog",
        observes=("ConfigDiffers", "Progress", "JoinRefused"),
    ),
)


def open_guest(*arguments: Any, **more: Any) -> Any:
    """Open the session of a connection without a node: see `observe.watching.session.open_session`."""
    return load("rallypoint.observe.watching.session:open_session")(*arguments, **more)
