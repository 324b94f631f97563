"""Names of torch's modules, on a machine without torch."""

from __future__ import annotations

import sys

import pytest

from rallypoint.compat import names
from tests.processes import completed

ASKS = """
import sys
sys.modules["torch"] = None  # as good as not installed
from importlib import import_module
from rallypoint.compat import names
from rallypoint.compat import __all__ as stores
assert all(isinstance(getattr(import_module("rallypoint.compat"), name), type) for name in stores)
for path in names.MODULES:
    import_module(f"rallypoint.compat.{path}")
for home, held in names.HOMES.items():
    module = import_module(home)
    for name in held.split():
        getattr(module, name)
for path, name in names.ELSEWHERE:
    getattr(import_module(f"rallypoint.compat.{path}"), name)
from rallypoint.compat.elastic import timer
from rallypoint.compat.elastic.agent.server.api import record
from rallypoint.compat import handlers, launch, run, shim
from rallypoint.compat.launcher import LaunchConfig
from rallypoint.compat.run import macros
import rallypoint.observe.telemetry.handlers, rallypoint.workers.timers
assert record is rallypoint.observe.telemetry.handlers.record
assert timer.configure is rallypoint.workers.timers.configure
assert not hasattr(timer, "__wrapped__")
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "line",
    [
        "",
        "from rallypoint.compat.elastic.multiprocessing.tail_log import TailLog",
        "from rallypoint.compat.elastic.timer import debug_info",
        "from rallypoint.compat.elastic.events import *",
        "from rallypoint.compat import all_reduce",
    ],
)
def test_names_without_torch(line: str) -> None:
    """Ours exist; one of torch's says what to install."""
    done = completed([sys.executable, "-c", ASKS + line])
    error = done.stderr.strip().rpartition("\n")[2]
    if line:
        assert error.startswith("ImportError: ")
        assert "install torch" in error
    else:
        assert error == ""


def test_a_name_has_one_home() -> None:
    listed = [name for held in names.HOMES.values() for name in held.split()]
    assert len(listed) == len(set(listed))
