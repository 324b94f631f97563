"""`rallyctl demo`: shows what Rallypoint does, in a minute and on one machine."""

from __future__ import annotations

import argparse
import os

from rallypoint.base.errors import UsageError
from rallypoint.cli.parse import Verb

_STEPS, _LEAST_STEPS = 120, 40
_DEADLINE = 90.0


def add_demo(verb: Verb) -> None:
    """Make `demo` a verb of `rallyctl`."""
    page = verb(
        "demo",
        "show a job that loses a worker, then a node, and goes on",
        "Show what Rallypoint is for, on this machine and in half a minute: a job of two workers is trained "
        "undisturbed; then again, with a worker killed half-way; then on three nodes (launchers on loopback), one of "
        "which is lost. It must resume each time and end with the same loss. Needs no torch. Exits with 1 if rallyrun "
        "does not do what it claims.",
        "--steps=240",
        _demo,
    )
    page.add_argument(
        "--program",
        metavar="FILE",
        help="train this, which takes --steps, --progress and --checkpoint-dir as examples/train_ddp.py does (default: "
        "a small network in plain Python)",
    )
    page.add_argument("--steps", type=int, default=_STEPS, metavar="N", help=f"steps to train (default: {_STEPS})")
    page.add_argument(
        "--deadline",
        type=float,
        default=_DEADLINE,
        metavar="SECONDS",
        help=f"how long to wait for the next step after a kill (default: {_DEADLINE:.0f})",
    )


def _demo(options: argparse.Namespace) -> None:
    from rallypoint.cli.exit import write_answer
    from rallypoint.demo.job import Plan, demo

    if options.steps < _LEAST_STEPS:
        raise UsageError(f"--steps={options.steps} is too few to be killed half-way; give {_LEAST_STEPS} or more")
    if not 1 <= options.deadline <= 3600:
        raise UsageError(f"--deadline={options.deadline:g} cannot be waited for; give 1 to 3600 seconds")
    if options.program and not os.path.isfile(options.program):
        raise UsageError(f"--program={options.program} is not a file; give the path of a Python script")
    _end_in_order()
    program = [options.program] if options.program else ["-m", "rallypoint.demo.worker"]
    demo(Plan(program, options.steps, options.deadline), write_answer)


def _end_in_order() -> None:
    """Make ^C and SIGTERM end the demo's own jobs first."""
    import signal

    from rallypoint.cli.process_setup import restore_keyboard_interrupt

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    restore_keyboard_interrupt()
    signal.signal(signal.SIGTERM, end)
