"""Readings that hang, break or die, in this process and in one of their own, which imports this file."""

from __future__ import annotations

import os
import threading

from rallypoint.preflight.results import passed, warned
from rallypoint.preflight.table import Check, CheckInputs, Reading

SILENCE = warned("no answer", "wait")


def check(name: str) -> Check[str]:
    """One that tells the fact."""
    return Check(name, "", "", "", "", passed)


def _stuck(_inputs: CheckInputs) -> str:
    threading.Event().wait(60)
    return "late"


def _broken(_inputs: CheckInputs) -> str:
    raise ValueError("a defect")


def _killed(_inputs: CheckInputs) -> str:
    os.write(1, b'[0, [["a", "PA')  # it is ended in the middle of an answer
    os._exit(9)


def _found(inputs: CheckInputs) -> str:
    return inputs.log_dir


def hanging(may_hang: bool) -> tuple[Reading[str], ...]:
    """Three, of which the first hangs and the last is broken."""
    return (
        Reading(_stuck, (check("a"), check("b")), SILENCE, may_hang),
        Reading(_found, (check("c"),), SILENCE, may_hang),
        Reading(_broken, (check("d"),), SILENCE, may_hang),
    )


DYING = (Reading(_killed, (check("a"),), SILENCE, True), Reading(_found, (check("b"),), SILENCE))
IN_THREADS, IN_A_PROCESS = hanging(False), hanging(True)
