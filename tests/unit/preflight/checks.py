"""Checks that hang, fail or die, in this process and in a child, which imports this file."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

from rallypoint.clusters.preflight.results import Check, CheckInputs, CheckResult, passed, warned

SILENCE = warned("no answer", "wait")


def _stuck(_inputs: CheckInputs) -> Iterator[CheckResult]:
    threading.Event().wait(60)
    yield passed("late")


def _broken(_inputs: CheckInputs) -> Iterator[CheckResult]:
    raise ValueError("a defect")


def _killed(_inputs: CheckInputs) -> Iterator[CheckResult]:
    os.write(1, b'[0, [["a", "PA')  # in the middle of an answer
    os._exit(9)


def _found(inputs: CheckInputs) -> Iterator[CheckResult]:
    yield passed(inputs.log_dir)


def hanging(may_hang: bool) -> tuple[Check, ...]:
    """Three checks: the first hangs, the last fails."""
    return (
        Check(("a", "b"), _stuck, SILENCE, may_hang),
        Check(("c",), _found, SILENCE, may_hang),
        Check(("d",), _broken, SILENCE, may_hang),
    )


DYING = (Check(("a",), _killed, SILENCE, True), Check(("b",), _found, SILENCE))
IN_THREADS, IN_A_PROCESS = hanging(False), hanging(True)
