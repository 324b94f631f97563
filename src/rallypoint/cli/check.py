"""`rallyctl check`: checks whether this node can run a job, before one is started."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from rallypoint.base.errors import UsageError, UserError
from rallypoint.cli.job_session import add_rendezvous, parameters_of
from rallypoint.cli.parse import Verb

if TYPE_CHECKING:
    from rallypoint.preflight.results import CheckInputs


def add_check(verb: Verb) -> None:
    """Make `check` a verb of `rallyctl`."""
    page = verb(
        "check",
        "check whether this node can run a job",
        "Check this node before a job is started on it: shared memory, limits, space, names, the endpoint, GPUs "
        "(docs/how-to/preflight.md). Prints a line for each check: PASS, WARN or FAIL, name, fact, remedy. "
        "Exits with 0 if all have passed, 1 after a WARN, and 2 after a FAIL. rallyrun --preflight does the same on "
        "every node of a job before it joins.",
        "--endpoint=node1:29400 --require=shared-memory,gpus",
        _check,
    )
    what = page.add_argument_group("what is checked")
    what.add_argument("--endpoint", default="", metavar="HOST:PORT", help="the job's --rdzv-endpoint (default: none)")
    add_rendezvous(what, "the job's id, to ask its control plane for the time of day (etcd needs it)")
    what.add_argument("--log-dir", default="", metavar="DIR", help="folder of the logs (default: a temporary one)")
    output = page.add_argument_group("answer")
    output.add_argument("--json", action="store_true", help="print JSON (docs/how-to/preflight.md)")
    text = "checks that must be made and pass: each is a FAIL otherwise, a WARN included"
    output.add_argument("--require", default="", metavar="NAME,...", help=text)


def _check(options: argparse.Namespace) -> int:
    from rallypoint.cli.exit import print_answer
    from rallypoint.preflight.results import EXIT_CODES, results_json, with_required, worst
    from rallypoint.preflight.run import run_checks

    required = _required(options.require)
    results = with_required(run_checks(_inputs(options)), required)
    print_answer(results_json(results) if options.json else "\n".join(map(str, results)))
    return EXIT_CODES[worst(results)]


def _inputs(options: argparse.Namespace) -> CheckInputs:
    from rallypoint.preflight.results import CheckInputs

    log_dir = os.path.abspath(options.log_dir) if options.log_dir else ""
    if not options.endpoint:
        if options.rdzv_conf or options.rdzv_id:
            raise UsageError(
                "--rdzv-id and --rdzv-conf have an effect only with --endpoint; give that, or leave them out"
            )
        return CheckInputs(log_dir)
    from rallypoint.launch.preflight import inputs_of

    try:
        return inputs_of(parameters_of(options, options.endpoint), log_dir)
    except UserError as error:
        raise UsageError(str(error)) from None


def _required(text: str) -> tuple[str, ...]:
    from rallypoint.preflight.run import NAMES

    names = tuple(part.strip() for part in text.split(",")) if text else ()
    for name in names:
        if name not in NAMES:
            raise UsageError(
                f"--require={text} names {name!r}, which is not a check; the checks are {', '.join(NAMES)}"
            )
    return names
