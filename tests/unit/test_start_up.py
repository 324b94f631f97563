"""What the package itself imports, and the names that it has."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process


def imported_by(code: str) -> set[str]:
    shown = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(shown.stdout.split())


def test_the_package_itself_costs_next_to_nothing() -> None:
    imported = imported_by("import rallypoint")
    assert not imported & {"dataclasses", "enum", "re", "typing"}
    assert {name for name in imported if name.startswith("rallypoint")} == {"rallypoint"}


def test_the_names_a_user_types_are_there() -> None:
    import rallypoint

    assert all(getattr(rallypoint, name) is not None for name in rallypoint.__all__)
