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
        "which is lost. It must resume each time and end with the same loss. Where torch is installed, and on a "
        "terminal, torchrun takes its turn with the same program and the same kills, which takes a minute more. Needs "
        "no torch itself. Exits with 1 if rallyrun does not do what it claims.",
        "--no-torchrun",
        _demo,
    )
    page.add_argument(
        "--torchrun",
        action=argparse.BooleanOptionalAction,
        help="show torchrun beside rallyrun (default: where torch is installed and output is a terminal)",
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
    from importlib.util import find_spec

    from rallypoint.cli.exit import write_answer
    from rallypoint.demo.scenarios import OURS, THEIRS, Plan, demo
    from rallypoint.demo.screen import account

    if options.steps < _LEAST_STEPS:
        raise UsageError(f"--steps={options.steps} is too few to be killed half-way; give {_LEAST_STEPS} or more")
    if not 1 <= options.deadline <= 3600:
        raise UsageError(f"--deadline={options.deadline:g} cannot be waited for; give 1 to 3600 seconds")
    if options.program and not os.path.isfile(options.program):
        raise UsageError(f"--program={options.program} is not a file; give the path of a Python script")
    has_torch = find_spec("torch") is not None
    if options.torchrun and not has_torch:
        raise UsageError("--torchrun needs torch, which is not installed; install it, or leave the flag out")
    _end_in_order()
    with account(write_answer) as shown:
        beside = has_torch and shown.live if options.torchrun is None else options.torchrun
        program = [options.program] if options.program else ["-m", "rallypoint.demo.worker"]
        demo(Plan(program, options.steps, [OURS, *([THEIRS] if beside else [])], options.deadline), shown)


def _end_in_order() -> None:
    """Make ^C and SIGTERM end the demo's own jobs first."""
    import signal

    from rallypoint.cli.process_setup import restore_keyboard_interrupt

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    restore_keyboard_interrupt()
    signal.signal(signal.SIGTERM, end)
