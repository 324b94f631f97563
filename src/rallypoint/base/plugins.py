"""Names that are looked up only when they are used: `module:attribute` strings and installed entry points."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load(target: str) -> Any:
    """The object that `module:attribute` names. Raises ImportError or AttributeError as the import does."""
    module, _, attribute = target.partition(":")
    found: Any = import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def entry_point(group: str, name: str) -> Any | None:
    """The loaded entry point `name` of `group`, or None if no installed package offers it.

    The package metadata is read only here (it costs tens of milliseconds), so call it for names that are not ours.
    """
    from importlib.metadata import entry_points

    for found in entry_points(group=group, name=name):
        return found.load()
    return None


def entry_point_names(group: str) -> list[str]:
    """Names that installed packages offer in `group`, sorted; for messages that say what is allowed."""
    from importlib.metadata import entry_points

    return sorted(entry_points(group=group).names)
