"""The verbs of `rallyctl` for a running job. They show or control it in a watcher's session with its coordinator."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from rallypoint.base.errors import RallypointError, UsageError, UserError
from rallypoint.cli.exit import print_answer, print_error
from rallypoint.cli.parse import parse_nnodes
from rallypoint.control.protocol.messages import CollectedPart, CollectKind
from rallypoint.observe.watching.client import (
    UnreachableError,
    WatcherSession,
    open_session,
    operator_name,
    with_all_nodes,
)
from rallypoint.observe.watching.messages import (
    CollectCommand,
    Command,
    CommandReply,
    DrainCommand,
    JobList,
    JobSummary,
    ListRequest,
    ResizeCommand,
    RestartCommand,
    Snapshot,
    StopCommand,
    WatchRequest,
)

if TYPE_CHECKING:
    from rallypoint.cli.following import Display, Follower
    from rallypoint.cli.local_jobs import RunningJob
    from rallypoint.control.client.dialing import DialTarget
    from rallypoint.features.local_jobs import EndedJob
    from rallypoint.rendezvous.params import RendezvousParameters

PHASE_CODES = {"running": 0, "waiting": 3, "forming": 3, "held back": 3, "failed": 4, "stopped": 4, "succeeded": 5}
"""Exit codes of `rallyctl status` by phase; 1 if the job cannot be reached."""
_UNCUT = 100_000
"""The width, in characters, of a line outside a terminal."""
_MOST_NAMED = 8
"""Maximum number of jobs that a sentence names."""

_Seen = TypeVar("_Seen")


# The job, and a session with its coordinator


def parameters_of(options: argparse.Namespace, endpoint: str) -> RendezvousParameters:
    """Build the rendezvous from `--rdzv-backend`, `--rdzv-id` and `--rdzv-conf`. Raises UserError: `--rdzv-conf`
    cannot be read, or a value cannot work.
    """
    from rallypoint.rendezvous.params import RendezvousParameters, parse_rdzv_conf

    config = parse_rdzv_conf(options.rdzv_conf)
    return RendezvousParameters(options.rdzv_backend or "c10d", endpoint, options.rdzv_id, 1, 1, **config)


def targets(options: argparse.Namespace) -> list[DialTarget]:
    """Where the job's coordinator may be. A job on this machine is looked up only once; the options then contain its
    id and how to reach its agent.
    """
    from rallypoint.cli.local_jobs import is_endpoint, job_named, targets_of
    from rallypoint.rendezvous.params import parse_rdzv_conf

    if options.found is None:
        endpoint = given_endpoint(options)
        job = None if is_endpoint(endpoint) else job_named(endpoint, options.rdzv_id)
        if job is None:
            from rallypoint.rendezvous.coordinators import coordinators

            return coordinators(parameters_of(options, endpoint))
        options.found = job.first_agent
        options.rdzv_id = job.first_agent.job
    return targets_of(options.found, parse_rdzv_conf(options.rdzv_conf))


def given_endpoint(options: argparse.Namespace) -> str:
    """The endpoint or job name that the user specified; empty for none. Other `PET_*` variables count only if the
    endpoint comes from one.
    """
    if options.endpoint and options.rdzv_endpoint:
        raise UsageError("the endpoint is set twice; use either ENDPOINT or --rdzv-endpoint")
    endpoint: str = options.endpoint or options.rdzv_endpoint or os.environ.get("RALLYPOINT_ENDPOINT", "")
    if "$" in endpoint + options.rdzv_id:
        from rallypoint.cli.consistency import refuse_unexpanded

        refuse_unexpanded("the job's name", endpoint)
        refuse_unexpanded("--rdzv-id", options.rdzv_id)
    if endpoint or not os.environ.get("PET_RDZV_ENDPOINT"):
        return endpoint
    for name in ("rdzv_backend", "rdzv_id", "rdzv_conf"):
        setattr(options, name, getattr(options, name) or os.environ.get(f"PET_{name.upper()}", ""))
    return os.environ["PET_RDZV_ENDPOINT"]


def ended_here(options: argparse.Namespace, since: float = 0.0) -> EndedJob | None:
    """How the job ended, if it ended on this machine after `since` and this is known."""
    from rallypoint.cli.local_jobs import UNKNOWN, past_jobs_named, past_of

    job = options.found
    past = past_of(job) if job is not None else past_jobs_named(given_endpoint(options), options.rdzv_id)
    return past[0] if past and past[0].ended >= since and past[0].outcome not in UNKNOWN else None


Followed = tuple[Callable[[], "Sequence[DialTarget]"], Callable[[], str], Callable[[float], "EndedJob | None"]]


def followed(options: argparse.Namespace) -> Followed:
    """The functions with which a `Follower` finds the job."""
    return lambda: targets(options), lambda: options.rdzv_id, lambda since: ended_here(options, since)


def follower(options: argparse.Namespace, display: Display) -> Follower:
    from rallypoint.cli.following import Follower

    return Follower(*followed(options), display)


def with_session(options: argparse.Namespace, use: Callable[[WatcherSession], Awaitable[int]]) -> int:
    where = targets(options)

    async def run() -> int:
        async with await open_session(where, options.rdzv_id) as session:
            return await use(session)

    return asyncio.run(run())


async def receive(session: WatcherSession, kind: type[_Seen]) -> _Seen:
    """Receive a message of this kind. Raises RallypointError: the command names no job, and the control plane has
    none or several.
    """
    while True:
        seen = await session.receive()
        if isinstance(seen, kind):
            return seen
        if isinstance(seen, JobList):
            raise unnamed(seen)


async def collect(session: WatcherSession, take: Callable[[str, bytes], None]) -> CommandReply:
    """Pass each node's data, once complete, to `take` with the node's name; return the final answer. Data that is too
    long is truncated.
    """
    from rallypoint.observe.bundle import ON_DEMAND_LIMIT

    data: dict[str, bytearray] = {}
    while True:
        seen = await session.receive()
        if isinstance(seen, CollectedPart):
            received = data.setdefault(seen.node, bytearray())
            if len(received) <= 2 * ON_DEMAND_LIMIT:
                received += seen.data
            if seen.is_last:
                take(seen.node, bytes(data.pop(seen.node)))
        elif isinstance(seen, CommandReply):
            return seen
        elif isinstance(seen, JobList):
            raise unnamed(seen)


def unnamed(jobs: JobList) -> RallypointError:
    """The error for a command without a job's name, if the control plane has none or several."""
    if not jobs.jobs:
        return UnreachableError("no job is running at this control plane")
    names = ", ".join(job.job for job in jobs.jobs[:_MOST_NAMED])
    more = f" and {len(jobs.jobs) - _MOST_NAMED} more" if len(jobs.jobs) > _MOST_NAMED else ""
    return UsageError(f"the control plane has several jobs ({names}{more}); choose one with --rdzv-id")


# Verbs that show a job


def status(options: argparse.Namespace) -> int:
    from rallypoint.cli.local_jobs import NoJobError, past_jobs, past_jobs_named, running_jobs, show_past

    endpoint = given_endpoint(options)
    if not endpoint and not options.rdzv_id:
        jobs = running_jobs()
        if options.all or len(jobs) != 1:
            return _list_local_jobs(jobs, past_jobs(), options)
    try:
        return _status_of_running(options)
    except (NoJobError, UnreachableError) as error:
        if not (past := past_jobs_named(endpoint, options.rdzv_id)):
            raise
        if isinstance(error, UnreachableError):
            print_error(f"rallyctl: {error}")
        return show_past(past[0], options)


def _list_local_jobs(jobs: list[RunningJob], past: list[EndedJob], options: argparse.Namespace) -> int:
    from rallypoint.cli.local_jobs import show_jobs, with_snapshots
    from rallypoint.rendezvous.params import parse_rdzv_conf

    show_jobs(with_snapshots(jobs, parse_rdzv_conf(options.rdzv_conf)), past, options)
    return 0 if jobs or (options.all and past) else 1


def _status_of_running(options: argparse.Namespace) -> int:
    if options.watch:
        if options.node or options.all:
            raise UsageError("--watch shows only nodes that need attention; remove --node and --all")
        return _watch(options)

    async def show(session: WatcherSession) -> int:
        session.send(WatchRequest())
        while not isinstance(seen := await session.receive(), Snapshot):
            if isinstance(seen, JobList):
                _print_jobs(seen, options)
                return 0
        if options.node:
            seen = await session.snapshot(WatchRequest(node=options.node))
        elif options.all:
            seen = await with_all_nodes(seen, session.snapshot)
        ended = None
        if options.all and not options.rdzv_id:
            session.send(ListRequest())
            ended = (await receive(session, JobList)).ended
        _print_status(seen, options, ended)
        return PHASE_CODES[seen.phase.value]

    return with_session(options, show)


def _watch(options: argparse.Namespace) -> int:
    from rallypoint.cli.following import Screen, display_for

    display = display_for(options.json, print_answer)
    try:
        seen = asyncio.run(follower(options, display).run())
    finally:
        display.close()
    if isinstance(seen, JobList):
        _print_jobs(seen, options)
        return 0
    if not isinstance(seen, Snapshot):
        from rallypoint.cli.local_jobs import show_past

        return show_past(seen, options)
    if isinstance(display, Screen):  # its contents disappear when it closes
        _print_status(seen, options)
    return PHASE_CODES[seen.phase.value]


def _print_jobs(jobs: JobList, options: argparse.Namespace) -> None:
    if options.json:
        from rallypoint.observe.status import jobs_json

        print_answer(jobs_json(jobs, time.time()))
    else:
        from rallypoint.observe.status import job_lines

        print_answer("\n".join(job_lines(jobs, with_ended=options.all)))


def _print_status(snapshot: Snapshot, options: argparse.Namespace, ended: Sequence[JobSummary] | None = None) -> None:
    """Print the job's state. `ended`: jobs that ended at the same control plane, if requested."""
    if options.json:
        from rallypoint.observe.status import status_json

        print_answer(status_json(snapshot, time.time(), ended))
    else:
        from rallypoint.observe.status import ended_lines, status_lines

        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNCUT
        print_answer("\n".join([*status_lines(snapshot, width), *ended_lines(ended or ())]))


def _ranks(options: argparse.Namespace) -> tuple[int, ...]:
    return () if options.rank < 0 else (options.rank,)


def stacks(options: argparse.Namespace) -> int:
    from rallypoint.observe.hangs.evidence import decode_stacks
    from rallypoint.observe.hangs.report import GatheredStacks

    gathered = GatheredStacks()

    def add_stacks(node: str, data: bytes) -> None:
        try:
            gathered.add(worker for worker in decode_stacks(data) if options.rank in (-1, worker.rank))
        except ValueError as error:
            print_error(f"rallyctl: the answer from {node} contains no stacks: {error}")

    async def show(session: WatcherSession) -> int:
        session.send(CollectCommand(operator_name(), CollectKind.STACKS, _ranks(options)))
        reply = await collect(session, add_stacks)
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
        seen = await with_all_nodes(await receive(session, Snapshot), session.snapshot)
        session.send(CollectCommand(operator_name(), CollectKind.BUNDLE, _ranks(options)))
        moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        parent = os.path.join(options.output, safe_name(seen.job), f"on-demand-{moment}")
        names = {node.name: f"{safe_name(node.host)}-{node.pid}" for node in seen.nodes}
        answered = 0

        def take(node: str, data: bytes) -> None:
            nonlocal answered
            answered += 1
            try:
                write_bundle(parent, names.get(node) or safe_name(node), decode_bundle(data))
            except ValueError as error:
                print_error(f"rallyctl: the answer from {node} is not a valid bundle: {error}")

        try:
            _write_index(parent, seen)
            reply = await collect(session, take)
        except OSError as error:
            raise UserError(
                f"--output={options.output} cannot be written: {error.strerror}; choose another path"
            ) from None
        if answered:
            print_answer(f"{answered} node{'' if answered == 1 else 's'} in {parent}")
        if not reply.done:
            raise RallypointError(reply.detail)
        return 0

    def _write_index(parent: str, seen: Snapshot) -> None:
        from rallypoint.features.incidents import index_fields

        write_index(parent, index_fields(seen, "requested by an operator", "", os.uname().nodename))

    return with_session(options, show)


# Verbs that change a job


def require_job(options: argparse.Namespace) -> None:
    """Refuse a command without a job's name: the only job on this machine may belong to somebody else.

    Raises:
        UsageError: neither an argument nor the environment names a job. NoJobError: no job is running here either.
    """
    from rallypoint.cli.local_jobs import candidates, job_named, running_jobs
    from rallypoint.cli.slurm_step import NAMED

    if given_endpoint(options) or options.rdzv_id or NAMED in os.environ:
        return
    if not (jobs := running_jobs()):
        job_named("", "")
    raise UsageError(f"select the job to {options.verb} by its number, id, port or script:\n{candidates(jobs)}")


def _command(options: argparse.Namespace, doing: str, make: Callable[[str], Command]) -> int:
    """Print the job's name and state, then send it a command."""
    require_job(options)

    async def send_command(session: WatcherSession) -> int:
        from rallypoint.observe.status import job_words

        session.send(WatchRequest())
        seen = await receive(session, Snapshot)
        print_error(f"rallyctl: {doing} job {seen.job}: {job_words(seen)}")
        session.send(make(operator_name()))
        reply = await receive(session, CommandReply)
        if not reply.done:
            raise RallypointError(f"{reply.detail}; nothing was changed")
        print_answer(reply.detail)
        return 0

    return with_session(options, send_command)


def restart(options: argparse.Namespace) -> int:
    return _command(options, "restarting", RestartCommand)


def stop(options: argparse.Namespace) -> int:
    return _command(options, "stopping", StopCommand)


def drain(options: argparse.Namespace) -> int:
    from rallypoint.cli.local_jobs import either_order

    either_order(options, "node", re.compile(r".+"))
    return _command(options, f"draining {options.node} of", lambda by: DrainCommand(by, options.node))


def resize(options: argparse.Namespace) -> int:
    from rallypoint.cli.local_jobs import either_order

    either_order(options, "size", re.compile(r"[0-9]+(:[0-9]+)?"))
    try:
        least, most = parse_nnodes(options.size, "MIN:MAX")
    except UserError as error:
        raise UsageError(str(error)) from None
    return _command(options, "resizing", lambda by: ResizeCommand(by, least, most, options.force))
