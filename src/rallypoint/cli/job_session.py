"""Finds the job of a `rallyctl` verb, and opens a watcher's session with its coordinator."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, TypeVar

from rallypoint.base.errors import RallypointError, UsageError, UserError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rallypoint.client.endpoint_resolver import DialTarget
    from rallypoint.client.watcher import WatcherSession
    from rallypoint.protocol.observation import CommandReply, JobList
    from rallypoint.rendezvous.control_plane import LocalJob
    from rallypoint.rendezvous.params import RendezvousParameters

_MOST_NAMED = 8
"""The number of jobs that a sentence names."""

_Seen = TypeVar("_Seen")


def add_job(page: argparse.ArgumentParser) -> None:
    """Add the options that select the job."""
    job = page.add_argument_group("the job")
    job.add_argument("endpoint", nargs="?", default="", metavar="ENDPOINT", help="the job's --rdzv-endpoint")
    job.add_argument("--rdzv-endpoint", default="", metavar="ENDPOINT", help="the same")
    add_rendezvous(job, "the job, where the control plane or this machine has several")


def add_rendezvous(group: argparse._ArgumentGroup, id_help: str) -> None:
    """Add the options that say, besides the endpoint, how the job's nodes meet; `id_help` is the help of the id."""
    backends = ("c10d", "static", "etcd")
    text = "c10d, static or etcd (default: c10d)"
    group.add_argument("--rdzv-backend", default="c10d", choices=backends, metavar="NAME", help=text)
    group.add_argument("--rdzv-id", default="", metavar="ID", help=id_help)
    group.add_argument("--rdzv-conf", default="", metavar="K=V,...", help="options of the backend, such as tls_ca")


def parameters_of(options: argparse.Namespace, endpoint: str) -> RendezvousParameters:
    """The rendezvous that the options of `add_rendezvous` describe.

    Raises:
        UserError: `--rdzv-conf` cannot be read, or a value cannot work.
    """
    from rallypoint.rendezvous.params import RendezvousParameters, parse_rdzv_conf

    config = parse_rdzv_conf(options.rdzv_conf)
    return RendezvousParameters(options.rdzv_backend, endpoint, options.rdzv_id, 1, 1, **config)


def targets(options: argparse.Namespace) -> list[DialTarget]:
    """The places where the job's coordinator may be."""
    if options.endpoint and options.rdzv_endpoint:
        raise UsageError("the endpoint is given twice; give it as ENDPOINT or as --rdzv-endpoint")
    endpoint: str = options.endpoint or options.rdzv_endpoint
    if not endpoint:
        return _local_target(options)
    from rallypoint.agent.coordinators import coordinators

    return coordinators(parameters_of(options, endpoint))


def _local_target(options: argparse.Namespace) -> list[DialTarget]:
    """The coordinator of the only job on this machine, or of the named one."""
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
    """Open a session with the coordinator of the job that the options name, and return the result of `use`."""
    import asyncio

    from rallypoint.client.watcher import open_session

    where = targets(options)

    async def run() -> int:
        async with await open_session(where, options.rdzv_id) as session:
            return await use(session)

    return asyncio.run(run())


async def receive(session: WatcherSession, kind: type[_Seen]) -> _Seen:
    """Wait for an answer of this type.

    Raises:
        RallypointError: the control plane has several jobs, or none, and none was named.
    """
    from rallypoint.protocol.observation import JobList

    while True:
        seen = await session.receive()
        if isinstance(seen, kind):
            return seen
        if isinstance(seen, JobList):
            raise _unnamed(seen)


async def collect(session: WatcherSession) -> tuple[dict[str, bytearray], CommandReply]:
    """What each node has sent, by its name, and the final answer. Data that is too long is truncated."""
    from rallypoint.observe.bundle import ON_DEMAND_LIMIT
    from rallypoint.protocol.observation import CommandReply, JobList
    from rallypoint.protocol.operator_messages import CollectedPart

    data: dict[str, bytearray] = {}
    while True:
        seen = await session.receive()
        if isinstance(seen, CollectedPart):
            found = data.setdefault(seen.node, bytearray())
            if len(found) <= 2 * ON_DEMAND_LIMIT:
                found += seen.data
        elif isinstance(seen, CommandReply):
            return data, seen
        elif isinstance(seen, JobList):
            raise _unnamed(seen)


def _unnamed(jobs: JobList) -> RallypointError:
    """The error for a command that names no job, if the control plane has several or none."""
    if not jobs.jobs:
        return RallypointError("the control plane has no job at the moment; nothing was changed")
    names = ", ".join(each.job for each in jobs.jobs[:_MOST_NAMED])
    more = f" and {len(jobs.jobs) - _MOST_NAMED} more" if len(jobs.jobs) > _MOST_NAMED else ""
    return UserError(f"the control plane has several jobs ({names}{more}); name one by --rdzv-id")
