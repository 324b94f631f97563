"""`rallyctl report`: how a job has spent its time, from the events that its agents have written."""

from __future__ import annotations

import argparse

from rallypoint.base.errors import UserError
from rallypoint.cli.parse import Verb


def add_report(verb: Verb) -> None:
    """Make `report` a verb of `rallyctl`."""
    report = verb(
        "report",
        "show how a job spent its time",
        "Show how a job spent its time: productive time, time lost by cause, restarts by cause and host, mean time "
        "between failures, slowest recoveries. It reads what rallyrun --event-log-handler=jsonl:PATH has written, of "
        "one node or of all; files that were rotated away are found beside the others. Incident bundles below the same "
        "folders (--incident-dir) are listed; where there are bundles alone, these.",
        "events/ --html report.html",
        _report,
    )
    report.add_argument("paths", nargs="+", metavar="PATH", help="files of events, or folders of such files")
    report.add_argument("--job", default="", metavar="ID", help="the job, where the files have several")
    report.add_argument("--json", action="store_true", help="print JSON (docs/reference/report.md)")
    report.add_argument("--html", default="", metavar="FILE", help="write one self-contained page with timelines")


def _report(options: argparse.Namespace) -> None:
    from rallypoint.cli.exit import print_answer
    from rallypoint.observe.bundle import incident_lines, incidents_json, read_incidents
    from rallypoint.observe.event_files import read_events
    from rallypoint.observe.goodput import agent_runs, report
    from rallypoint.observe.report_text import report_json, report_lines

    incidents = read_incidents(options.paths)
    try:
        found = read_events(options.paths)
    except UserError:
        if not incidents.found or options.html or options.job:
            raise
        print_answer(incidents_json(incidents) if options.json else "\n".join(incident_lines(incidents.found)))
        return
    job = options.job or _only_job(list(found.events))
    if job not in found.events:
        raise UserError(f"there are no events of the job {job!r}; the files have {_names(list(found.events))}")
    made = report(agent_runs(found.events[job]), found.notes)
    if options.html:
        from rallypoint.observe.report_html import report_html

        try:
            with open(options.html, "w", encoding="utf-8") as file:
                file.write(report_html(made))
        except OSError as error:
            raise UserError(f"--html={options.html} cannot be written: {error.strerror}") from None
    if options.json or not options.html:
        own = [each for each in incidents.found if each.job == job]
        more = ["", "Incidents", *(f"  {line}" for line in incident_lines(own))] if own else []
        print_answer(report_json(made) if options.json else "\n".join([*report_lines(made), *more]))


def _only_job(jobs: list[str]) -> str:
    if len(jobs) > 1:
        raise UserError(f"the events are of {len(jobs)} jobs, {_names(jobs)}; name one by --job")
    return jobs[0]


def _names(jobs: list[str]) -> str:
    from rallypoint.base.log import printable

    shown = ", ".join(printable(each, 80) for each in jobs[:4])
    return f"{shown} and {len(jobs) - 4} more" if len(jobs) > 4 else shown
