"""What is imported on the way to the first worker: a list, not a timer."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

HEAVY = {
    "asyncio",
    "concurrent.futures",
    "ctypes",
    "email",
    "http",
    "importlib.metadata",
    "msgspec",
    "multiprocessing",
    "pickle",
    "psutil",
    "ssl",
    "tempfile",
    "torch",
    "urllib",
    "uvloop",
}
"""Modules that cost milliseconds and that a job on one node does not need before its workers run."""


def imported_by(code: str) -> set[str]:
    shown = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(shown.stdout.split())


def test_what_a_job_on_one_node_needs_is_light() -> None:
    modules = imported_by(
        "import rallypoint.cli.rallyrun, rallypoint.cli.convert, rallypoint.cli.exit, rallypoint.agent.launch.api\n"
        "import rallypoint.rendezvous.backends.embedded, rallypoint.workers.logs.specs\n"
    )
    assert not modules & HEAVY


def test_the_package_itself_costs_next_to_nothing() -> None:
    imported = imported_by("import rallypoint")
    assert not imported & {"dataclasses", "enum", "re", "typing"}
    assert {name for name in imported if name.startswith("rallypoint")} == {"rallypoint"}


def test_the_names_a_user_types_are_there() -> None:
    import rallypoint

    assert all(getattr(rallypoint, name) is not None for name in rallypoint.__all__)
