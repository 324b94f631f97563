"""Verbs of `rallyctl` that show a job and control it: a watcher's session with its coordinator."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rallypoint.base.errors import RallypointError, UsageError, UserError
from rallypoint.cli.job_session import add_job, collect, local_jobs_of_user, receive, targets, with_session
from rallypoint.cli.parse import Verb

if TYPE_CHECKING:
    from collections.abc import Callable

    from rallypoint.client.watcher import WatcherSession
    from rallypoint.protocol.observation import Command, Snapshot
    from rallypoint.rendezvous.control_plane import LocalJob

PHASE_CODES = {"running": 0, "waiting": 3, "forming": 3, "held back": 3, "failed": 4, "stopped": 4, "succeeded": 5}
"""The exit codes of `rallyctl status` by phase; 1 if the job cannot be reached."""
_UNCUT = 100_000
"""Characters of a line if it is not shown on a terminal."""


def _status(options: argparse.Namespace) -> int:
    from rallypoint.protocol.observation import JobList, Snapshot, WatchRequest

    if not options.endpoint and not options.rdzv_endpoint and not options.rdzv_id:
        jobs = local_jobs_of_user()
        if len(jobs) != 1:
            return _list_local_jobs(jobs, options)

    if options.watch:
        return _watch(options)

    async def show(session: WatcherSession) -> int:
        session.send(WatchRequest())
        while True:
            seen = await session.receive()
            if isinstance(seen, JobList):
                _print_jobs(seen, options)
                return 0
            if isinstance(seen, Snapshot):
                _print_status(seen, options)
                return PHASE_CODES[seen.phase.value]

    return with_session(options, show)


def _watch(options: argparse.Namespace) -> int:
    """Follow a job until it ends."""
    import asyncio

    from rallypoint.cli.exit import print_answer
    from rallypoint.cli.following import Follower, Lines, display_for
    from rallypoint.protocol.observation import JobList

    display = display_for(options.json, print_answer)
    try:
        seen = asyncio.run(Follower(lambda: targets(options), options.rdzv_id, display).run())
    finally:
        display.close()
    if isinstance(seen, JobList):
        _print_jobs(seen, options)
        return 0
    if not options.json and not isinstance(display, Lines):  # the contents of the screen are gone with it
        _print_status(seen, options)
    return PHASE_CODES[seen.phase.value]


def _list_local_jobs(jobs: list[LocalJob], options: argparse.Namespace) -> int:
    from rallypoint.cli.exit import print_answer
    from rallypoint.observe.status import table

    if options.json:
        import json

        from rallypoint.observe.status import VERSION

        print_answer(json.dumps({"version": VERSION, "jobs": [each._asdict() for each in jobs]}, indent=2))
    elif jobs:
        rows = [("JOB", "BACKEND", "ENDPOINT", "AGENT")]
        print_answer(
            "\n".join(table([*rows, *((each.job, each.backend, each.endpoint, str(each.pid)) for each in jobs)]))
        )
    else:
        print_answer("no job of this user runs on this machine; give the --rdzv-endpoint of one that runs elsewhere")
    return 0 if jobs else 1


def _print_jobs(jobs: Any, options: argparse.Namespace) -> None:
    from rallypoint.cli.exit import print_answer

    if options.json:
        from rallypoint.observe.status import jobs_json

        print_answer(jobs_json(jobs.jobs))
    else:
        from rallypoint.observe.status import job_lines

        print_answer("\n".join(job_lines(jobs.jobs)))


def _print_status(snapshot: Snapshot, options: argparse.Namespace) -> None:
    import shutil
    import sys
    import time

    from rallypoint.cli.exit import print_answer

    if options.json:
        from rallypoint.observe.status import status_json

        print_answer(status_json(snapshot, time.time()))
    else:
        from rallypoint.observe.status import status_lines

        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNCUT
        print_answer("\n".join(status_lines(snapshot, width)))


def _command(options: argparse.Namespace, make: Callable[[str], Command]) -> int:
    from rallypoint.cli.exit import print_answer
    from rallypoint.client.watcher import operator_name
    from rallypoint.protocol.observation import CommandReply

    async def give(session: WatcherSession) -> int:
        session.send(make(operator_name()))
        reply = await receive(session, CommandReply)
        if not reply.done:
            raise RallypointError(f"{reply.detail}; nothing was changed")
        print_answer(reply.detail)
        return 0

    return with_session(options, give)


def _restart(options: argparse.Namespace) -> int:
    from rallypoint.protocol.observation import RestartCommand

    return _command(options, RestartCommand)


def _stop(options: argparse.Namespace) -> int:
    from rallypoint.protocol.observation import StopCommand

    return _command(options, StopCommand)


def _drain(options: argparse.Namespace) -> int:
    from rallypoint.protocol.observation import DrainCommand

    return _command(options, lambda by: DrainCommand(by, options.node))


def _resize(options: argparse.Namespace) -> int:
    from rallypoint.cli.sizes import parse_nnodes
    from rallypoint.protocol.observation import ResizeCommand

    try:
        least, most = parse_nnodes(options.size, "MIN:MAX")
    except UserError as error:
        raise UsageError(str(error)) from None
    return _command(options, lambda by: ResizeCommand(by, least, most))


def _stacks(options: argparse.Namespace) -> int:
    from rallypoint.cli.exit import print_answer
    from rallypoint.client.watcher import operator_name
    from rallypoint.hangs.report import stack_lines
    from rallypoint.hangs.stacks import decode_stacks
    from rallypoint.protocol.observation import CollectCommand
    from rallypoint.protocol.operator_messages import CollectKind

    async def show(session: WatcherSession) -> int:
        session.send(CollectCommand(operator_name(), CollectKind.STACKS, options.rank))
        parts, reply = await collect(session)
        found = [each for data in parts.values() for each in decode_stacks(bytes(data))]
        if options.rank >= 0:
            found = [each for each in found if each.rank == options.rank]
        if found:
            print_answer("\n".join(stack_lines(found)))
        if not reply.done:
            raise RallypointError(reply.detail)
        return 0 if any(not each.error for each in found) else 1

    return with_session(options, show)


def add_watching(verb: Verb) -> None:
    """Add the verbs to `rallyctl`."""
    status = verb(
        "status",
        "show the status of a job",
        "Show the status of a job: phase, round, nodes, restarts, last failures and events. The command never counts "
        "as a node. Without an endpoint it shows the jobs of this machine. Exits with 0 while the job runs, 3 while it "
        "waits for nodes or forms a round, 4 if it has failed or was stopped, 5 if it has succeeded, and 1 if it "
        "cannot be reached.",
        "node1:29400 --watch",
        _status,
    )
    add_job(status)
    output = status.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON (docs/reference/status.md)")
    output.add_argument(
        "--watch",
        action="store_true",
        help="follow the job until it ends: a live screen on a terminal, else a line a change",
    )
    text = "End the round that runs and begin another, at no cost to --max-restarts."
    add_job(verb("restart", "restart the workers of a job", text, "node1:29400", _restart))
    text = "End a job on all its nodes, with the verdict 'stopped'."
    add_job(verb("stop", "end a job", text, "node1:29400", _stop))
    drain = verb(
        "drain",
        "remove a node from a job",
        "Have a node leave: its workers are notified and save, as before a preemption (notice_timeout in --rdzv-conf), "
        "and a spare takes its place.",
        "node7 node1:29400",
        _drain,
    )
    drain.add_argument("node", metavar="NODE", help="host, address, pid@host or group rank")
    add_job(drain)
    resize = verb(
        "resize",
        "change how many nodes a job has",
        "Change how many nodes the rounds to come have at least and at most. It does not end the round that runs; "
        "waiting nodes and spares that have a place then are taken in at once.",
        "4:8 node1:29400",
        _resize,
    )
    resize.add_argument("size", metavar="MIN:MAX", help="numbers of nodes, as for --nnodes")
    add_job(resize)
    stacks = verb(
        "stacks",
        "show the Python stacks of a job's workers",
        "Show the Python stacks of workers that run, read by py-spy (pip install rallypoint[stacks]) without stopping "
        "them: equal stacks once, with the ranks that have them.",
        "node1:29400 --rank=3",
        _stacks,
    )
    add_job(stacks)
    rank = "of this global rank alone (default: of all)"
    stacks.add_argument_group("output").add_argument("--rank", type=int, default=-1, metavar="N", help=rank)
