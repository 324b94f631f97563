"""Objects that are looked up when they are used: `module:attribute` strings and installed entry points."""

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
    """The loaded entry point `name` of `group`, or None if no installed package has it.

    The package metadata are read only here (that takes tens of milliseconds), so call it for names that are not ours.
    """
    from importlib.metadata import entry_points

    for found in entry_points(group=group, name=name):
        return found.load()
    return None


def entry_point_names(group: str) -> list[str]:
    """Names of the installed entry points in `group`, sorted; for messages."""
    from importlib.metadata import entry_points

    return sorted(entry_points(group=group).names)
