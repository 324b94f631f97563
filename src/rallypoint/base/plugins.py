"""Objects looked up on use: `module:attribute` strings and installed entry points."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module

from rallypoint.base.errors import UserError, user_error
from rallypoint.base.light_typing import Any
from rallypoint.base.log import get_logger

_log = get_logger(__name__)


def load(target: str) -> Any:
    """Import the object named by `module:attribute`. Raises ImportError or AttributeError."""
    module, _, attribute = target.partition(":")
    value: Any = import_module(module)
    for part in attribute.split("."):
        value = getattr(value, part)
    return value


def entry_point(group: str, name: str) -> Any | None:
    """The loaded entry point `name` of `group`, or None if no installed package has it.

    This reads the package metadata, which takes tens of milliseconds: call it only for names that are not ours.
    """
    from importlib.metadata import entry_points

    for entry in entry_points(group=group, name=name):
        return entry.load()
    return None


def entry_point_names(group: str) -> list[str]:
    """Sorted names of the installed entry points in `group`, for messages."""
    from importlib.metadata import entry_points

    return sorted(entry_points(group=group).names)


def plugin(group: str, name: str, what: str, known: Iterable[str], make: Callable[[Any], Any]) -> Any:
    """Call `make` with the entry point `name` and return the result; messages use `what` and our `known` names. Raises
    UserError if no package offers the name (also a KeyError), or if its entry point fails.
    """
    try:
        offer = entry_point(group, name)
        instance = None if offer is None else make(offer)
    except Exception as error:  # third-party code can raise anything
        _log.info("the %s %r failed", what, name, exc_info=True)
        raise UserError(
            f"the {what} {name!r} cannot be created ({type(error).__name__}: {error}); check the package that provides "
            f"it in the entry-point group {group}, and set LOGLEVEL=INFO to see the traceback"
        ) from error
    if offer is None:
        names = ", ".join(sorted({*known, *entry_point_names(group)}))
        raise user_error(f"no installed package provides the {what} {name!r}; use one of {names}", KeyError)
    return instance
