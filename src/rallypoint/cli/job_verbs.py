"""The verbs of `rallyctl` for a job that runs: a watcher's session with its coordinator shows it, or controls it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from rallypoint.base.errors import RallypointError, UsageError, UserError
from rallypoint.cli.exit import print_answer, print_error
from rallypoint.cli.parse import parse_nnodes
from rallypoint.control.client.watcher import WatcherSession, open_session, operator_name, with_all_nodes
from rallypoint.control.protocol.messages import CollectedPart, CollectKind
from rallypoint.control.protocol.observation import (
    CollectCommand,
    Command,
    CommandReply,
    DrainCommand,
    JobList,
    ResizeCommand,
    RestartCommand,
    Snapshot,
    StopCommand,
    WatchRequest,
)

if TYPE_CHECKING:
    from rallypoint.control.client.dialing import DialTarget
    from rallypoint.rendezvous.handler import LocalJob
    from rallypoint.rendezvous.params import RendezvousParameters

PHASE_CODES = {"running": 0, "waiting": 3, "forming": 3, "held back": 3, "failed": 4, "stopped": 4, "succeeded": 5}
"""The exit codes of `rallyctl status` by phase; 1 if the job cannot be reached."""
_UNCUT = 100_000
"""Characters of a line if it is not shown on a terminal."""
_MOST_NAMED = 8
"""The number of jobs that a sentence names."""

_Seen = TypeVar("_Seen")


# The job, and a session with its coordinator


def parameters_of(options: argparse.Namespace, endpoint: str) -> RendezvousParameters:
    """The rendezvous that `--rdzv-backend`, `--rdzv-id` and `--rdzv-conf` describe. Raises UserError: `--rdzv-conf`
    cannot be read, or a value cannot work.
    """
    from rallypoint.rendezvous.params import RendezvousParameters, parse_rdzv_conf

    config = parse_rdzv_conf(options.rdzv_conf)
    return RendezvousParameters(options.rdzv_backend, endpoint, options.rdzv_id, 1, 1, **config)


def endpoint_of(options: argparse.Namespace) -> str:
    if options.endpoint and options.rdzv_endpoint:
        raise UsageError("the endpoint is given twice; give it as ENDPOINT or as --rdzv-endpoint")
    endpoint: str = options.endpoint or options.rdzv_endpoint
    return endpoint


def targets(options: argparse.Namespace) -> list[DialTarget]:
    """The places where the job's coordinator may be."""
    endpoint = endpoint_of(options)
    if not endpoint:
        return _local_target(options)
    from rallypoint.agent.coordinators import coordinators

    return coordinators(parameters_of(options, endpoint))


def _local_target(options: argparse.Namespace) -> list[DialTarget]:
    jobs = [each for each in local_jobs_of_user() if options.rdzv_id in {"", each.job}]
    if len(jobs) == 1:
        options.rdzv_id, options.rdzv_backend, options.rdzv_endpoint = jobs[0][1:]
        _take_token(jobs[0])
        return targets(options)
    named = f" with --rdzv-id={options.rdzv_id}" if options.rdzv_id else ""
    if len({each.job for each in jobs}) == 1:
        raise UsageError(
            f"there are {len(jobs)} jobs {jobs[0].job!r} on this machine, {_places(jobs)}; give the endpoint of one"
        )
    if jobs:
        raise UsageError(
            f"there are {len(jobs)} jobs on this machine; name one by --rdzv-id ('rallyctl status' lists them)"
        )
    raise RallypointError(f"no job of this user{named} runs on this machine; give the job's --rdzv-endpoint")


def _places(jobs: list[LocalJob]) -> str:
    """Where jobs of one id are, in words."""
    shown = [f"at {each.endpoint} (agent {each.pid})" for each in jobs[:_MOST_NAMED]]
    return " and ".join([*shown, "others"] if len(jobs) > _MOST_NAMED else shown)


def _take_token(job: LocalJob) -> None:
    """If this command was given no secret, take the token of a job of this user from its agent."""
    from rallypoint.agent.features.local_socket import local_token
    from rallypoint.base.secrets import SECRET

    if not {SECRET, f"{SECRET}_FILE"} & os.environ.keys() and (token := local_token(job)):
        os.environ[SECRET] = token


def local_jobs_of_user() -> list[LocalJob]:
    """The jobs on this machine that this user may see, each once: all agents of a job report the same, and two jobs of
    one id differ in their endpoints.
    """
    from rallypoint.agent.features.local_socket import local_jobs

    found = {each[1:]: each for each in local_jobs()}
    return sorted(found.values(), key=lambda each: (each.job, each.pid))


def with_session(options: argparse.Namespace, use: Callable[[WatcherSession], Awaitable[int]]) -> int:
    where = targets(options)

    async def run() -> int:
        async with await open_session(where, options.rdzv_id) as session:
            return await use(session)

    return asyncio.run(run())


async def receive(session: WatcherSession, kind: type[_Seen]) -> _Seen:
    """Raises RallypointError: the control plane has several jobs, or none, and none was named."""
    while True:
        seen = await session.receive()
        if isinstance(seen, kind):
            return seen
        if isinstance(seen, JobList):
            raise _unnamed(seen)


async def collect(session: WatcherSession, take: Callable[[str, bytes], None]) -> CommandReply:
    """Have what each node sends taken, by its name, as soon as it is whole; returns the final answer. Data that is too
    long is truncated.
    """
    from rallypoint.observe.bundle import ON_DEMAND_LIMIT

    data: dict[str, bytearray] = {}
    while True:
        seen = await session.receive()
        if isinstance(seen, CollectedPart):
            found = data.setdefault(seen.node, bytearray())
            if len(found) <= 2 * ON_DEMAND_LIMIT:
                found += seen.data
            if seen.is_last:
                take(seen.node, bytes(data.pop(seen.node)))
        elif isinstance(seen, CommandReply):
            return seen
        elif isinstance(seen, JobList):
            raise _unnamed(seen)


def _unnamed(jobs: JobList) -> RallypointError:
    """The error for a command that names no job, if the control plane has several or none."""
    if not jobs.jobs:
        return RallypointError("the control plane has no job at the moment; nothing was changed")
    names = ", ".join(each.job for each in jobs.jobs[:_MOST_NAMED])
    more = f" and {len(jobs.jobs) - _MOST_NAMED} more" if len(jobs.jobs) > _MOST_NAMED else ""
    return UserError(f"the control plane has several jobs ({names}{more}); name one by --rdzv-id")


# Verbs that show it


def status(options: argparse.Namespace) -> int:
    if not options.endpoint and not options.rdzv_endpoint and not options.rdzv_id:
        jobs = local_jobs_of_user()
        if len(jobs) != 1:
            return _list_local_jobs(jobs, options)

    if options.watch:
        if options.node or options.all:
            raise UsageError("--watch shows the nodes that need attention; leave --node and --all out")
        return _watch(options)

    async def show(session: WatcherSession) -> int:
        session.send(WatchRequest())
        while not isinstance(seen := await session.receive(), Snapshot):
            if isinstance(seen, JobList):
                _print_jobs(seen, options)
                return 0
        if options.node:
            seen = await _snapshot(session, WatchRequest(node=options.node))
        elif options.all:
            seen = await all_nodes(session, seen)
        _print_status(seen, options)
        return PHASE_CODES[seen.phase.value]

    return with_session(options, show)


async def all_nodes(session: WatcherSession, seen: Snapshot) -> Snapshot:
    """The snapshot that was just received, with the rows of all nodes."""
    return await with_all_nodes(seen, lambda request: _snapshot(session, request))


async def _snapshot(session: WatcherSession, request: WatchRequest) -> Snapshot:
    session.send(request)
    while not isinstance(seen := await session.receive(), Snapshot):
        if isinstance(seen, CommandReply):
            raise RallypointError(seen.detail)
    return seen


def _watch(options: argparse.Namespace) -> int:
    from rallypoint.cli.following import Follower, Screen, display_for

    display = display_for(options.json, print_answer)
    try:
        seen = asyncio.run(Follower(lambda: targets(options), options.rdzv_id, display).run())
    finally:
        display.close()
    if isinstance(seen, JobList):
        _print_jobs(seen, options)
        return 0
    if isinstance(display, Screen):  # its contents are gone with it
        _print_status(seen, options)
    return PHASE_CODES[seen.phase.value]


def _list_local_jobs(jobs: list[LocalJob], options: argparse.Namespace) -> int:
    from rallypoint.observe.status import table

    if options.json:
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


def _print_jobs(jobs: JobList, options: argparse.Namespace) -> None:
    if options.json:
        from rallypoint.observe.status import jobs_json

        print_answer(jobs_json(jobs.jobs))
    else:
        from rallypoint.observe.status import job_lines

        print_answer("\n".join(job_lines(jobs.jobs)))


def _print_status(snapshot: Snapshot, options: argparse.Namespace) -> None:
    if options.json:
        from rallypoint.observe.status import status_json

        print_answer(status_json(snapshot, time.time()))
    else:
        from rallypoint.observe.status import status_lines

        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNCUT
        print_answer("\n".join(status_lines(snapshot, width)))


def stacks(options: argparse.Namespace) -> int:
    from rallypoint.observe.hangs.evidence import decode_stacks
    from rallypoint.observe.hangs.report import GatheredStacks

    gathered = GatheredStacks()

    def take(node: str, data: bytes) -> None:
        try:
            gathered.add(each for each in decode_stacks(data) if options.rank in (-1, each.rank))
        except ValueError as error:
            print_error(f"rallyctl: what {node} has sent are not stacks: {error}")

    async def show(session: WatcherSession) -> int:
        session.send(CollectCommand(operator_name(), CollectKind.STACKS, options.rank))
        reply = await collect(session, take)
        if lines := gathered.lines():
            print_answer("\n".join(lines))
        if not reply.done:
            raise RallypointError(reply.detail)
        return 0 if gathered.any_found else 1

    return with_session(options, show)


def bundle(options: argparse.Namespace) -> int:
    from rallypoint.observe.bundle import decode_bundle, safe_name, write_bundle, write_index

    async def show(session: WatcherSession) -> int:
        session.send(WatchRequest())
        seen = await all_nodes(session, await receive(session, Snapshot))
        session.send(CollectCommand(operator_name(), CollectKind.BUNDLE, options.rank))
        moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        parent = os.path.join(options.output, safe_name(seen.job), f"on-demand-{moment}")
        names = {each.name: f"{safe_name(each.host)}-{each.pid}" for each in seen.nodes}
        answered = 0

        def take(node: str, data: bytes) -> None:
            nonlocal answered
            answered += 1
            try:
                write_bundle(parent, names.get(node) or safe_name(node), decode_bundle(data))
            except ValueError as error:
                print_error(f"rallyctl: what {node} has sent is not a bundle: {error}")

        try:
            _write_index(parent, seen)
            reply = await collect(session, take)
        except OSError as error:
            raise UserError(f"--output={options.output} cannot be written: {error.strerror}; name another") from None
        if answered:
            print_answer(f"{answered} node{'' if answered == 1 else 's'} in {parent}")
        if not reply.done:
            raise RallypointError(reply.detail)
        return 0

    def _write_index(parent: str, seen: Snapshot) -> None:
        from rallypoint.agent.features.incidents import index_fields

        write_index(parent, index_fields(seen, "an operator asked", "", os.uname().nodename))

    return with_session(options, show)


# Verbs that change it


def _command(options: argparse.Namespace, make: Callable[[str], Command]) -> int:
    async def give(session: WatcherSession) -> int:
        session.send(make(operator_name()))
        reply = await receive(session, CommandReply)
        if not reply.done:
            raise RallypointError(f"{reply.detail}; nothing was changed")
        print_answer(reply.detail)
        return 0

    return with_session(options, give)


def restart(options: argparse.Namespace) -> int:
    return _command(options, RestartCommand)


def stop(options: argparse.Namespace) -> int:
    return _command(options, StopCommand)


def drain(options: argparse.Namespace) -> int:
    return _command(options, lambda by: DrainCommand(by, options.node))


def resize(options: argparse.Namespace) -> int:
    try:
        least, most = parse_nnodes(options.size, "MIN:MAX")
    except UserError as error:
        raise UsageError(str(error)) from None
    return _command(options, lambda by: ResizeCommand(by, least, most))
