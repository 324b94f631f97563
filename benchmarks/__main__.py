"""The command line: choose benchmarks, run them one after the other, print one table and write it as JSON."""

from __future__ import annotations

import argparse
import compileall
import json
import sys
import time
from pathlib import Path

from benchmarks import (
    chart,
    figures,
    floods,
    logs,
    many_workers,
    memory,
    next_step,
    preload,
    recovery,
    rendezvous,
    results,
    scale,
    start,
    store,
)
from benchmarks.case import Case, Row, Settings, render
from benchmarks.results import Machine, this_machine

CASES: tuple[Case, ...] = (
    start.HELP,
    start.START,
    memory.CASE,
    start.RESTART,
    start.RESTART_OF_PAIR,
    many_workers.CASE,
    preload.CASE,
    *recovery.CASES,
    *next_step.CASES,
    rendezvous.CASE,
    scale.CASE,
    floods.CASE,
    store.RAW_CASE,
    store.START_UP_CASE,
    logs.CASE,
)
"""All benchmarks, in the order of the table. A new one is a line here, and one in `chart.TITLES` to be in the chart."""


def main(argv: list[str] | None = None) -> int:
    """Run what was chosen; 0 if every figure of ours could be measured (budgets met or not), else 1."""
    options = _parser().parse_args(argv)
    _compile()
    machine = this_machine()
    begun = time.monotonic()
    everything = not options.cases and not options.quick
    run = results.begin(machine, everything and options.go_on)
    for case in options.cases or CASES:
        if case.name in run.rows:
            print(f"{case.name}: measured in an earlier sitting", file=sys.stderr)
            continue
        print(f"{case.name}: {case.subject}", file=sys.stderr)
        rows = case.run(Settings(options.rounds or (1 if options.quick else case.rounds), options.quick))
        if everything:
            results.keep(run, case.name, rows)
        else:
            run.rows[case.name] = rows
    rows = [row for case in CASES for row in run.rows.get(case.name, [])]
    rounds = _rounds(rows)
    written = [results.write(rows, run.machine, options.quick)]
    if everything:
        written += _publish(rows, run.machine, rounds)
        results.finish()
    print(f"{run.machine}\n{rounds}, in turn (lowest..highest), {(time.monotonic() - begun) / 60:.0f} minutes\n")
    print(f"{render(rows)}\n\nwritten to {', '.join(map(str, written))}")
    return 1 if any(row.ours is None for row in rows) else 0


def _publish(rows: list[Row], machine: Machine, rounds: str) -> list[Path]:
    """Write the chart, the values behind it, and the figures of the documents."""
    values = results.write(rows, machine, False, chart.PATH.with_suffix(".json"))
    return [values, chart.write(rows, machine, rounds), *figures.write(json.loads(values.read_text()))]


def _rounds(rows: list[Row]) -> str:
    """What there is to say of how many values a median is of."""
    counts = sorted({len(row.ours.values) for row in rows if row.ours is not None})
    return f"medians of {' or '.join(map(str, counts))} rounds"


def _compile() -> None:
    """Have byte code for the package, as every installed package has: torch's was compiled when it was installed."""
    import rallypoint

    for folder in rallypoint.__path__:
        compileall.compile_dir(folder, quiet=1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures Rallypoint against torchrun and torch's store, in turn, in one run.",
        epilog="benchmarks:\n" + "\n".join(f"  {case.name:<20} {case.subject}" for case in CASES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="*", type=_case, metavar="NAME", help="run only these (default: all)")
    parser.add_argument(
        "--rounds", type=_positive, metavar="N", help="results for each side (default: 3 or 5, with --quick 1)"
    )
    parser.add_argument(
        "--continue",
        action="store_true",
        dest="go_on",
        help="continue with a run of everything that was interrupted: leave out what it has measured",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes and short loads: does everything run?")
    return parser


def _case(name: str) -> Case:
    for case in CASES:
        if case.name == name:
            return case
    names = ", ".join(case.name for case in CASES)
    raise argparse.ArgumentTypeError(f"there is no benchmark {name!r}; choose from {names}")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rounds; give 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
