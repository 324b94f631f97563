"""`rallyctl bundle`: collects what the nodes of a running job know about it, in one folder."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING

from rallypoint.base.errors import RallypointError, UserError
from rallypoint.cli.job_session import add_job, collect, receive, with_session
from rallypoint.cli.parse import Verb

if TYPE_CHECKING:
    from rallypoint.client.watcher import WatcherSession
    from rallypoint.protocol.observation import Snapshot


def add_bundle(verb: Verb) -> None:
    """Make `bundle` a verb of `rallyctl`."""
    page = verb(
        "bundle",
        "collect diagnostics from the nodes of a job",
        "Collect what the nodes of a job that runs know of it: stacks, the last lines of each worker, environment with "
        "secrets masked, versions, the kernel's words, and how the job stands. Nothing is stopped. rallyrun "
        "--incident-dir keeps the same after each failure.",
        "node1:29400 -o bundles",
        _bundle,
    )
    add_job(page)
    text = "folder below which it is written (default: here)"
    page.add_argument_group("output").add_argument("-o", "--output", default=".", metavar="DIR", help=text)


def _bundle(options: argparse.Namespace) -> int:
    from rallypoint.cli.exit import print_answer, print_error
    from rallypoint.client.watcher import operator_name
    from rallypoint.observe.bundle import decode_bundle, safe_name, write_bundle, write_index
    from rallypoint.protocol.observation import CollectCommand, Snapshot, WatchRequest
    from rallypoint.protocol.operator_messages import CollectKind

    async def show(session: WatcherSession) -> int:
        session.send(WatchRequest())
        seen = await receive(session, Snapshot)
        session.send(CollectCommand(operator_name(), CollectKind.BUNDLE))
        data, reply = await collect(session)
        moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        parent = os.path.join(options.output, safe_name(seen.job), f"on-demand-{moment}")
        names = {each.name: f"{safe_name(each.host)}-{each.pid}" for each in seen.nodes}
        try:
            _write_index(parent, seen)
            for node, each in sorted(data.items()):
                try:
                    write_bundle(parent, names.get(node) or safe_name(node), decode_bundle(bytes(each)))
                except ValueError as error:
                    print_error(f"rallyctl: what {node} has sent is no bundle: {error}")
        except OSError as error:
            raise UserError(f"--output={options.output} cannot be written: {error.strerror}; name another") from None
        if data:
            print_answer(f"{len(data)} node{'' if len(data) == 1 else 's'} in {parent}")
        if not reply.done:
            raise RallypointError(reply.detail)
        return 0

    def _write_index(parent: str, seen: Snapshot) -> None:
        from rallypoint.agent.features.incidents import index_fields

        write_index(parent, index_fields(seen, "an operator asked", "", os.uname().nodename))

    return with_session(options, show)
