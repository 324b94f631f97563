"""Each program of `examples/frameworks` undisturbed, with a worker killed, stopped, preloaded, and with a node killed.

    make frameworks

The final number of a disturbed launch must equal that of the undisturbed one, and no process and no file of
Rallypoint's may be left. `make test-all` runs a part of this (`test_examples.py`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.frameworks.programs import PROGRAMS, Program
from tests.frameworks.runs import Outcome, Runs

TOLERANCE = 1e-6


def main() -> int:
    """Run all, print a table; 1 if a number differs, something is left, or a program cannot run here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="*", help="names of programs; all where none is given")
    wanted = parser.parse_args().programs
    print(
        "| program | runs | worker killed, told of a stop, resumed | preloaded, worker killed | node killed |\n"
        "|---|---|---|---|---|"
    )
    wrong = 0
    for program in PROGRAMS:
        if not wanted or program.name in wanted:
            row = list(cells(program))
            wrong += any("**" in each for each in row)
            print(f"| {program.name} | {' | '.join(row)} |", flush=True)
    return 1 if wrong else 0


def cells(program: Program) -> Iterator[str]:
    """The fields of a program's row."""
    if program.python() is None:
        yield f"**{program.package} is not installed**"
        return
    with tempfile.TemporaryDirectory(prefix="fw-") as folder:
        runs = Runs(program, Path(folder))
        alone = runs.undisturbed()
        yield cell(alone, alone)
        if program.saves_before_stop:
            stopped, resumed = runs.killed_and_stopped()
            recovered = resumed._replace(recovery=stopped.recovery, left=stopped.left + resumed.left)
            yield f"resumed from step {resumed.begun[0][1]}: {cell(recovered, alone)}"
        else:
            yield cell(runs.worker_killed(), alone)
        yield cell(runs.preloaded(), alone)
        yield cell(runs.node_killed(), alone)


def cell(outcome: Outcome, expected: Outcome) -> str:
    """One field of the table; bold where something is wrong."""
    if outcome.loss is None or expected.loss is None:
        (Path(tempfile.gettempdir()) / "frameworks-failed.log").write_text(outcome.said)
        return "**failed**"
    differs = abs(outcome.loss - expected.loss)
    said = "same number" if differs <= TOLERANCE * max(1.0, abs(expected.loss)) else f"**differs by {differs:g}**"
    if outcome.recovery is not None:
        said += f", next step after {outcome.recovery:.2f} s"
    if outcome.not_preloaded:
        said += f", not preloaded: {outcome.not_preloaded}"
    if outcome.left:
        said += f", **left: {'; '.join(outcome.left)}**"
    return f"{said} ({outcome.seconds:.1f} s)"


if __name__ == "__main__":
    sys.exit(main())
