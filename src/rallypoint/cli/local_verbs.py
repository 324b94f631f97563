"""The verbs of `rallyctl` that work without a job: trials, checks, reports, secrets, completion."""

from __future__ import annotations

import argparse
import os
import signal
from typing import TYPE_CHECKING

from rallypoint.base.errors import RallypointError, UsageError, UserError
from rallypoint.cli.exit import print_answer, print_error, write_answer

if TYPE_CHECKING:
    from rallypoint.clusters.preflight.results import CheckInputs

_LEAST_STEPS = 40
"""Minimum number of steps for a demonstration."""
_ETCD_ENDS = {signal.SIGTERM, signal.SIGINT}


def demo(options: argparse.Namespace) -> None:
    from rallypoint.cli.demo.job import DemoPlan
    from rallypoint.cli.demo.job import demo as run_demo

    if options.steps < _LEAST_STEPS:
        raise UsageError(f"--steps={options.steps} is too small for a kill halfway; set it to {_LEAST_STEPS} or more")
    if not 1 <= options.deadline <= 3600:
        raise UsageError(f"--deadline={options.deadline:g} is out of range; set it to 1 to 3600 seconds")
    for flag, path in (("--program", options.program), ("--standby-program", options.standby_program)):
        if path and not os.path.isfile(path):
            raise UsageError(f"{flag}={path} is not a file; set it to the path of a Python script")
    _end_in_order()
    program = [options.program] if options.program else ["-m", "rallypoint.cli.demo.worker"]
    standby = [options.standby_program] if options.standby_program else []
    run_demo(DemoPlan(program, options.steps, options.deadline, standby), write_answer)


def _end_in_order() -> None:
    from rallypoint.cli.process_setup import restore_keyboard_interrupt

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    restore_keyboard_interrupt()
    signal.signal(signal.SIGTERM, end)


def check(options: argparse.Namespace) -> int:
    from rallypoint.clusters.preflight.results import EXIT_CODES, results_json, with_required, worst
    from rallypoint.clusters.preflight.run import run_checks

    required = _required_checks(options.require)
    results = with_required(run_checks(_check_inputs(options)), required)
    print_answer(results_json(results) if options.json else "\n".join(map(str, results)))
    return EXIT_CODES[worst(results)]


def _check_inputs(options: argparse.Namespace) -> CheckInputs:
    from rallypoint.cli.job_verbs import given_endpoint, parameters_of
    from rallypoint.clusters.preflight.results import CheckInputs

    if options.config:
        from rallypoint.cli.config import read_config

        values = read_config(options.config).values
        for name in ("rdzv_endpoint", "rdzv_backend", "rdzv_id", "rdzv_conf", "log_dir", "nproc_per_node"):
            if not getattr(options, name) and not (name == "rdzv_endpoint" and options.endpoint):
                setattr(options, name, values.get(name, ""))
    log_dir = os.path.abspath(options.log_dir) if options.log_dir else ""
    endpoint = given_endpoint(options)
    if not endpoint:
        if options.rdzv_conf or options.rdzv_id:
            raise UsageError("--rdzv-id and --rdzv-conf have no effect without an endpoint; set one, or remove them")
        return CheckInputs(log_dir, workers=_workers(options.nproc_per_node))
    from rallypoint.features.preflight import inputs_of

    try:
        inputs = inputs_of(parameters_of(options, endpoint), log_dir)
    except UserError as error:
        raise UsageError(str(error)) from None
    return inputs._replace(workers=_workers(options.nproc_per_node))


def _workers(text: str | None) -> int:
    """The specified number; 0 for none, or if workers cannot be counted: the check of accelerators says why."""
    if not text:
        return 0
    from rallypoint.cli.convert import local_world_size

    try:
        return local_world_size(text, os.environ)
    except UserError as error:
        if text != "auto":
            raise UsageError(str(error)) from None
        return 0


def _required_checks(text: str) -> tuple[str, ...]:
    from rallypoint.clusters.preflight.run import NAMES

    names = tuple(part.strip() for part in text.split(",")) if text else ()
    for name in names:
        if name not in NAMES:
            raise UsageError(
                f"--require={text} lists {name!r}, which is not a check; the checks are {', '.join(NAMES)}"
            )
    return names


def report(options: argparse.Namespace) -> None:
    from rallypoint.observe.bundle import incident_lines, incidents_json, read_incidents
    from rallypoint.observe.goodput import agent_runs, report
    from rallypoint.observe.report import read_events, report_json, report_lines

    incidents = read_incidents(options.paths)
    try:
        contents = read_events(options.paths)
    except UserError:
        if not incidents.found or options.job:
            raise
        print_answer(incidents_json(incidents) if options.json else "\n".join(incident_lines(incidents.found)))
        return
    job = options.job or _only_job(list(contents.events))
    if job not in contents.events:
        raise UserError(
            f"the files contain no events of job {job!r}; they contain events of {_names(list(contents.events))}"
        )
    summary = report(agent_runs(contents.events[job]), contents.notes)
    own = [incident for incident in incidents.found if incident.job == job]
    more = ["", "Incidents", *(f"  {line}" for line in incident_lines(own))] if own else []
    print_answer(report_json(summary) if options.json else "\n".join([*report_lines(summary), *more]))


def _only_job(jobs: list[str]) -> str:
    if len(jobs) > 1:
        raise UserError(f"the files contain events of {len(jobs)} jobs, {_names(jobs)}; choose one with --job")
    return jobs[0]


def _names(jobs: list[str]) -> str:
    from rallypoint.base.log import printable

    shown = ", ".join(printable(job, 80) for job in jobs[:4])
    return f"{shown} and {len(jobs) - 4} more" if len(jobs) > 4 else shown


def secret(options: argparse.Namespace) -> None:
    from rallypoint.base.secrets import new_secret

    if not options.output:
        print_answer(new_secret())
        return
    try:
        with open(os.open(options.output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(f"{new_secret()}\n")
    except OSError as error:
        raise UserError(f"--output={options.output} cannot be created: {error.strerror}; choose another file") from None


def job_token(options: argparse.Namespace) -> None:
    from rallypoint.base.secrets import SECRET, job_secret, token

    own_secret = job_secret()
    if own_secret is None:
        raise UsageError(
            f"{SECRET} is not set; create a secret with 'rallyctl secret', and set it for this command too"
        )
    print_answer(token(own_secret, options.job))


def etcd(options: argparse.Namespace) -> None:
    from rallypoint.base.kernel import check_kernel
    from rallypoint.control.etcd.local import LocalEtcd

    if not options.timeout > 0:
        raise UsageError(f"--timeout={options.timeout:g} is too short; set it to more than 0 seconds")
    if options.num_retries < 0:
        raise UsageError(f"--num-retries={options.num_retries} is negative; set it to 0 or more")
    check_kernel()
    # Blocked, so that only `sigwait` receives them. It also receives SIGCHLD.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_ETCD_ENDS, signal.SIGCHLD})
    server = LocalEtcd(options.port, options.data_dir)
    log = None
    if options.stderr is not None:
        try:
            log = open(options.stderr, "ab")  # noqa: SIM115 - closed below
        except OSError as error:
            raise UserError(f"--stderr={options.stderr} cannot be written: {error.strerror}") from None
    try:
        try:
            server.start(options.timeout, options.num_retries, log, unwanted=_asked_to_end)
            print_answer(str(server.endpoint))
        except RallypointError:
            if not _asked_to_end():
                raise
        while (number := signal.sigwait({*_ETCD_ENDS, signal.SIGCHLD})) == signal.SIGCHLD:
            if server.has_ended:
                raise RallypointError(f"the etcd server at {server.endpoint} exited on its own")
    finally:
        server.stop()
        if log is not None:
            log.close()
    print_error(f"rallyctl: stopped by {signal.Signals(number).name}")


def _asked_to_end() -> bool:
    return bool(_ETCD_ENDS & signal.sigpending())


def completion(options: argparse.Namespace) -> None:
    from rallypoint.cli.completion import printed_script
    from rallypoint.cli.parse import build_parser as build_launcher
    from rallypoint.cli.rallyctl import build_parser

    print_answer(printed_script(options.shell, {"rallyrun": build_launcher(), "rallyctl": build_parser()}))
