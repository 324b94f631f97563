"""The extensions of a coordinator, loaded from a table of names (`extension`). Pure; cheap to import."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import count

from rallypoint.base.light_typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rallypoint.control.coordinator.extension import Extension
    from rallypoint.control.coordinator.sessions import SessionRecord
    from rallypoint.control.membership.state import State

TABLE = "rallypoint.features.coordinator_table"
"""The module with the table `EXTENSIONS`."""

GUEST = f"{TABLE}:open_guest"
"""Function that opens a session for a connection without a node."""


class ExtensionRow(NamedTuple):
    """One extension.

    Args:
        name: its key for `find`.
        place: its class, as `module:Class`.
        hears: type names of the nodes' messages that load it.
        observes: type names of the messages to nodes that it observes.
        needed: the state's field that is nonempty if the state needs the extension; empty for no field.
    """

    name: str
    place: str
    hears: tuple[str, ...] = ()
    observes: tuple[str, ...] = ()
    needed: str = ""


def load(place: str) -> Any:
    """Import the object at a place of the form `module:name`."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


class Extensions:
    """The extensions of one coordinator."""

    def __init__(self, job: Any) -> None:
        """Prepare the extensions of the coordinator `job`, which each one gets when it is created."""
        self._job = job
        rows: Sequence[ExtensionRow] = load(f"{TABLE}:EXTENSIONS")
        self._rows = {row.name: row for row in rows}
        self._by_name: dict[str, Extension] = {}
        self._needed = [row for row in rows if row.needed]
        """Extensions that a state might need and that are not loaded yet."""
        self._hearing = {kind: row.name for row in rows for kind in row.hears}
        self.observing = {kind: row.name for row in rows for kind in row.observes}
        """Maps each message's type name to the extension that observes it."""
        self.loaded: list[Extension] = []
        self.numbers = count(1)
        """Numbers for extensions' requests to nodes; each is used once."""

    def find(self, name: str) -> Any:
        """Return the extension with that name, importing it if needed."""
        if name not in self._by_name:
            row = self._rows[name]
            self._by_name[name] = extension = load(row.place)(self._job)
            self.loaded.append(extension)
            self._needed = [other for other in self._needed if other is not row]
        return self._by_name[name]

    def receive(self, speaker: SessionRecord, message: Any, now: float) -> None:
        """Pass on a node's message that is not for the coordinator itself."""
        if (name := self._hearing.get(type(message).__name__)) is not None:
            self.find(name)
        for extension in self.loaded:
            if (handle := extension.handlers.get(type(message))) is not None:
                handle(speaker, message, now)

    def on_change(self, before: State, after: State, now: float) -> None:
        """Pass on a change of the state."""
        for row in self._needed:
            if getattr(after, row.needed):
                self.find(row.name)
        for extension in self.loaded:
            extension.on_change(before, after, now)

    def on_message(self, message: Any, now: float) -> None:
        """Pass on a message of an observed type that is sent to a node."""
        self.find(self.observing[type(message).__name__]).on_message(message, now)
