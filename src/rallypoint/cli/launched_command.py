"""Reads the flags of a `rallyrun` that `rallyctl launch` will start, by rallyrun's own parser: a mistake is reported
once, before any host is reached, and not once by each of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rallypoint.base.errors import UsageError
from rallypoint.cli.parse import build_parser, parse_nnodes, parse_with


class LaunchedCommand(NamedTuple):
    """A command: `least` is the number of nodes without which its job cannot go on, 0 if that is not known;
    `most` is the number that run at a time; `endpoint_given` is whether it names a control plane of its own.
    """

    least: int = 0
    most: int = 0
    endpoint_given: bool = False


def read_command(command: Sequence[str], variables: Mapping[str, str], hosts: int) -> LaunchedCommand:
    """Read a command.

    Args:
        command: its words. Nothing is known about commands other than `rallyrun`.
        variables: the `PET_*` variables that it will have, without those that say where it runs.
        hosts: the number of hosts that it will run on, which is the default number of nodes.

    Raises:
        SystemExit: a usage error of rallyrun's, which has been printed; or its help was asked for.
        UserError: the number of nodes is impossible.
    """
    given = "PET_RDZV_ENDPOINT" in variables
    if os.path.basename(command[0]) != "rallyrun":
        return LaunchedCommand(endpoint_given=given)
    parser = build_parser()
    parser.prog = "rallyrun"
    options, _ = parse_with(parser, command[1:], {"PET_NNODES": str(hosts), **variables})
    if options.standalone:
        return LaunchedCommand(endpoint_given=given)
    source = options.source("nnodes")
    least, most = parse_nnodes(options.nnodes, source)
    if least > hosts:
        raise UsageError(
            f"{source}={options.nnodes} needs {least} nodes, and {hosts} host{' is' if hosts == 1 else 's are'} given; "
            "give more hosts, or leave it out"
        )
    return LaunchedCommand(least, most, given or "rdzv_endpoint" in options.sources)
