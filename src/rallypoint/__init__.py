"""Rallypoint starts distributed Python jobs, keeps them alive, and says why they died.

The names that users need are here. Each is imported on first use, so importing the package costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers understand it; importing typing would be half of this module's cost
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.agent.launch import LaunchConfig, elastic_launch
    from rallypoint.agent.options import Features
    from rallypoint.base.version import __version__
    from rallypoint.failures.record import record
    from rallypoint.failures.report import ChildFailedError

__all__ = ["ChildFailedError", "Features", "LaunchConfig", "__version__", "elastic_launch", "record"]

_HOME = {
    "__version__": "rallypoint.base.version",
    "ChildFailedError": "rallypoint.failures.report",
    "Features": "rallypoint.agent.options",
    "LaunchConfig": "rallypoint.agent.launch",
    "elastic_launch": "rallypoint.agent.launch",
    "record": "rallypoint.failures.record",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rallypoint' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
