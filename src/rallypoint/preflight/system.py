"""Whether this system has the calls that only Linux has; made only where it does not (`base.portable`)."""

from __future__ import annotations

from rallypoint.base.portable import LACKS, system_name
from rallypoint.preflight.results import Judgement, warned
from rallypoint.preflight.table import Check, CheckInputs, Reading


def read_system(_inputs: CheckInputs) -> str:
    """What it is called."""
    return system_name()


def judge_system(name: str) -> Judgement:
    """It is good enough for a trial."""
    return warned(f"{name} is for development: {LACKS}", "run what matters on Linux (docs/how-to/macos.md)")


SYSTEM = Reading(
    read_system,
    (
        Check(
            "system",
            "Whether the system has what Rallypoint uses of Linux.",
            "it has not: only on macOS, and with RALLYPOINT_PLATFORM=portable",
            "",
            "run what matters on Linux",
            judge_system,
        ),
    ),
    warned("the system is not known", "see docs/how-to/macos.md"),
)
