"""Verbs of `rallyctl` that look at a job and steer it: a watcher's session with its coordinator."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rallypoint.base.errors import RallypointError, UsageError, UserError
from rallypoint.cli.parse import Verb

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rallypoint.client.endpoint_resolver import DialTarget
    from rallypoint.client.watcher import WatcherSession
    from rallypoint.protocol.observation import Command, CommandReply, JobList, Snapshot
    from rallypoint.rendezvous.control_plane import LocalJob

PHASE_CODES = {"running": 0, "waiting": 3, "forming": 3, "held back": 3, "failed": 4, "stopped": 4, "succeeded": 5}
"""What `rallyctl status` exits with, by phase; 1 where the job cannot be reached."""
_UNCUT = 100_000
"""Characters of a line where no terminal shows it."""
_MOST_NAMED = 8
"""How many jobs a sentence names."""


def _targets(options: argparse.Namespace) -> list[DialTarget]:
    """Where the job's coordinator may be."""
    if options.endpoint and options.rdzv_endpoint:
        raise UsageError("the endpoint is given twice; give it as ENDPOINT or as --rdzv-endpoint")
    endpoint: str = options.endpoint or options.rdzv_endpoint
    if not endpoint:
        return _local_target(options)
    from rallypoint.agent.coordinators import coordinators
    from rallypoint.rendezvous.params import RendezvousParameters, parse_rdzv_conf

    config = parse_rdzv_conf(options.rdzv_conf)
    return coordinators(RendezvousParameters(options.rdzv_backend, endpoint, options.rdzv_id, 1, 1, **config))


def _local_target(options: argparse.Namespace) -> list[DialTarget]:
    """The coordinator of the one job of this machine, or of the one that is named."""
    jobs = [each for each in _local_jobs() if options.rdzv_id in {"", each.job}]
    if len(jobs) == 1:
        options.rdzv_id, options.rdzv_backend, options.rdzv_endpoint = jobs[0][1:]
        return _targets(options)
    named = f" with --rdzv-id={options.rdzv_id}" if options.rdzv_id else ""
    if jobs:
        raise UsageError(
            f"there are {len(jobs)} jobs on this machine; name one by --rdzv-id ('rallyctl status' lists them)"
        )
    raise RallypointError(f"no job of this user{named} runs on this machine; give the job's --rdzv-endpoint")


def _local_jobs() -> list[LocalJob]:
    """The jobs of this machine that this user may see, each once: agents of one job say the same of it."""
    from rallypoint.agent.local_socket import local_jobs

    found = {(each.job, each.backend): each for each in local_jobs()}
    return sorted(found.values(), key=lambda each: each.job)


def with_session(options: argparse.Namespace, use: Callable[[WatcherSession], Awaitable[int]]) -> int:
    """Open a session with the coordinator of the job that the options name, and return what `use` makes of it."""
    import asyncio

    from rallypoint.client.watcher import UnreachableError, WatcherSession
    from rallypoint.protocol.handshake import HandshakeError

    targets = _targets(options)

    async def run() -> int:
        failure: RallypointError | None = None
        for target in targets:
            try:
                async with WatcherSession(target, options.rdzv_id) as session:
                    return await use(session)
            except HandshakeError as error:
                raise RallypointError(str(error)) from None
            except UnreachableError as error:
                failure = failure or error
        raise failure or RallypointError("nobody is coordinator at the moment")

    return asyncio.run(run())


def _status(options: argparse.Namespace) -> int:
    from rallypoint.protocol.observation import JobList, Snapshot, WatchRequest

    if not options.endpoint and not options.rdzv_endpoint and not options.rdzv_id:
        jobs = _local_jobs()
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
        seen = asyncio.run(Follower(lambda: _targets(options), options.rdzv_id, display).run())
    finally:
        display.close()
    if isinstance(seen, JobList):
        _print_jobs(seen, options)
        return 0
    if not options.json and not isinstance(display, Lines):  # what was on the screen is gone with it
        _print_status(seen, options)
    return PHASE_CODES[seen.phase.value]


def _list_local_jobs(jobs: list[LocalJob], options: argparse.Namespace) -> int:
    from rallypoint.cli.exit import print_answer
    from rallypoint.observe.status_text import table

    if options.json:
        import json

        from rallypoint.observe.status_json import VERSION

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
        from rallypoint.observe.status_json import jobs_json

        print_answer(jobs_json(jobs.jobs))
    else:
        from rallypoint.observe.status_text import job_lines

        print_answer("\n".join(job_lines(jobs.jobs)))


def _print_status(snapshot: Snapshot, options: argparse.Namespace) -> None:
    import shutil
    import sys
    import time

    from rallypoint.cli.exit import print_answer

    if options.json:
        from rallypoint.observe.status_json import status_json

        print_answer(status_json(snapshot, time.time()))
    else:
        from rallypoint.observe.status_text import status_lines

        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNCUT
        print_answer("\n".join(status_lines(snapshot, width)))


def _command(options: argparse.Namespace, make: Callable[[str], Command]) -> int:
    from rallypoint.cli.exit import print_answer
    from rallypoint.client.watcher import operator_name

    async def give(session: WatcherSession) -> int:
        session.send(make(operator_name()))
        reply = await _reply(session)
        if not reply.done:
            raise RallypointError(f"{reply.detail}; nothing was changed")
        print_answer(reply.detail)
        return 0

    return with_session(options, give)


async def _reply(session: WatcherSession) -> CommandReply:
    from rallypoint.protocol.observation import CommandReply, JobList

    while True:
        seen = await session.receive()
        if isinstance(seen, CommandReply):
            return seen
        if isinstance(seen, JobList):
            raise _unnamed(seen)


def _unnamed(jobs: JobList) -> RallypointError:
    """What a control plane with several jobs, or none, says to a command that names none."""
    if not jobs.jobs:
        return RallypointError("the control plane has no job at the moment; nothing was changed")
    names = ", ".join(each.job for each in jobs.jobs[:_MOST_NAMED])
    more = f" and {len(jobs.jobs) - _MOST_NAMED} more" if len(jobs.jobs) > _MOST_NAMED else ""
    return UserError(f"the control plane has several jobs ({names}{more}); name one by --rdzv-id")


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
    from rallypoint.observe.stacks import decode_stacks, grouped_stacks
    from rallypoint.protocol.observation import CollectCommand, CommandReply, JobList
    from rallypoint.protocol.operator_messages import CollectedPart, CollectKind

    async def show(session: WatcherSession) -> int:
        session.send(CollectCommand(operator_name(), CollectKind.STACKS, options.rank))
        parts: dict[str, bytearray] = {}
        while True:
            seen = await session.receive()
            if isinstance(seen, CollectedPart):
                parts.setdefault(seen.node, bytearray()).extend(seen.data)
            elif isinstance(seen, CommandReply):
                break
            elif isinstance(seen, JobList):
                raise _unnamed(seen)
        found = [each for data in parts.values() for each in decode_stacks(bytes(data))]
        if options.rank >= 0:
            found = [each for each in found if each.rank == options.rank]
        if found:
            print_answer("\n".join(grouped_stacks(found)))
        if not seen.done:
            raise RallypointError(seen.detail)
        return 0 if any(not each.error for each in found) else 1

    return with_session(options, show)


def add_watching(verb: Verb) -> None:
    """Add the verbs to `rallyctl`."""
    status = verb(
        "status",
        "show how a job stands",
        "Show how a job stands: phase, round, nodes, restarts, the last failures and events. This is never counted as "
        "a node. Without an endpoint it shows the jobs of this machine. Exits with 0 while the job runs, 3 while it "
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
        help="follow the job until it ends: a live screen on a terminal (rallypoint[screen]), else a line a change",
    )
    text = "End the round that runs and begin another, at no cost to --max-restarts."
    add_job(verb("restart", "restart the workers of a job", text, "node1:29400", _restart))
    text = "End a job on all its nodes, with the verdict 'stopped'."
    add_job(verb("stop", "end a job", text, "node1:29400", _stop))
    drain = verb(
        "drain",
        "have a node leave a job",
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


def add_job(page: argparse.ArgumentParser) -> None:
    """The options that say which job is meant."""
    job = page.add_argument_group("the job")
    job.add_argument("endpoint", nargs="?", default="", metavar="ENDPOINT", help="the job's --rdzv-endpoint")
    job.add_argument("--rdzv-endpoint", default="", metavar="ENDPOINT", help="the same")
    backends = ("c10d", "static", "etcd")
    text = "c10d, static or etcd (default: c10d)"
    job.add_argument("--rdzv-backend", default="c10d", choices=backends, metavar="NAME", help=text)
    several = "the job, where the control plane or this machine has several"
    job.add_argument("--rdzv-id", default="", metavar="ID", help=several)
    job.add_argument("--rdzv-conf", default="", metavar="K=V,...", help="options of the backend, such as tls_ca")
