"""`rallyctl launch`: runs a command on several hosts, over ssh.

The parser of `rallyrun` checks the flags of a `rallyrun` command here, so that a mistake is reported once, before any
host is reached, and not once per host.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rallypoint.base.errors import UsageError
from rallypoint.cli.exit import print_error
from rallypoint.cli.parse import build_parser, parse_nnodes, parse_with

if TYPE_CHECKING:
    from rallypoint.clusters.remote.inputs import Host
    from rallypoint.clusters.remote.job import LaunchPlan

_LARGEST_FILE = 1024 * 1024
"""Maximum size in bytes of a host file or a file of variables."""
_TIMES = {"connect_timeout": 3600, "lost_after": 86_400, "grace": 86_400}
"""Maximum values in seconds."""


def launch(options: argparse.Namespace) -> int:
    plan = _plan(options)
    from rallypoint.base.descriptors import allow_descriptors
    from rallypoint.cli.process_setup import restore_keyboard_interrupt
    from rallypoint.clusters.remote.job import launch as run_plan

    allow_descriptors(3 * len(plan.hosts), f"The connections to {len(plan.hosts)} hosts")
    restore_keyboard_interrupt()
    return run_plan(plan)


def _plan(options: argparse.Namespace) -> LaunchPlan:
    import shlex

    from rallypoint.base.secrets import SECRET, launch_secret
    from rallypoint.clusters.remote.job import LaunchPlan
    from rallypoint.clusters.remote.ssh import SshOptions

    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UsageError(
            "the command is missing; write it after --: rallyctl launch --hosts node1,node2 -- rallyrun t.py"
        )
    hosts = _hosts(options)
    times = {name: _seconds(options, name) for name in _TIMES}
    words: list[str] = []
    for text in options.ssh_args:
        try:
            words += shlex.split(text)
        except ValueError as error:
            raise UsageError(f"--ssh-args={text!r} cannot be parsed: {error}; quote it as for a shell") from None
    ssh = SshOptions(tuple(words), options.python or sys.executable, times["connect_timeout"], times["lost_after"])
    variables = _variables(options)
    known = read_command(command, {key: text for key, text in variables.items() if key.startswith("PET_")}, len(hosts))
    if 0 < known.most < len(hosts):
        print_error(f"rallyctl: {known.most} of {len(hosts)} hosts run at a time (--nnodes); the others are spares")
    # A control plane outside this launch might have no secret, and would refuse nodes that have one.
    if not {SECRET, f"{SECRET}_FILE"} & variables.keys() and (text := launch_secret(new=not known.endpoint_given)):
        variables[SECRET] = text
    folder = options.chdir or _folder()
    first = known.least > 0 and not known.endpoint_given
    return LaunchPlan(hosts, command, folder, variables, ssh, times["grace"], known.least, first)


def _hosts(options: argparse.Namespace) -> list[Host]:
    from rallypoint.clusters.remote.inputs import parse_hostfile, parse_hosts

    if bool(options.hosts) == bool(options.hostfile):
        both = "are both set; use only one of them" if options.hosts else "are both missing; use one of them"
        raise UsageError(f"--hosts and --hostfile {both}")
    if options.hosts:
        return parse_hosts(options.hosts)
    return parse_hostfile(_read(options.hostfile, "--hostfile"), options.hostfile)


def _variables(options: argparse.Namespace) -> dict[str, str]:
    from rallypoint.clusters.remote.inputs import file_variables, named_variables

    variables: dict[str, str] = {}
    for path in options.env_file:
        variables |= file_variables(_read(path, "--env-file"), path, os.environ)
    return variables | named_variables(options.env, os.environ)


def _read(path: str, flag: str) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise UsageError(f"{flag}={path!r} cannot be read: {error.strerror}; choose another file") from None
    if len(data) > _LARGEST_FILE:
        raise UsageError(f"{flag}={path!r} has more than {_LARGEST_FILE} bytes; use a smaller file")
    return data


def _seconds(options: argparse.Namespace, name: str) -> int:
    text = str(getattr(options, name))
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= _TIMES[name]):
        flag = name.replace("_", "-")
        raise UsageError(f"--{flag}={text!r} is not a number of seconds from 1 to {_TIMES[name]}")
    return int(text)


def _folder() -> str:
    """The folder of this command, by the name that the user sees: other hosts know it by that name."""
    shown = os.environ.get("PWD", "")
    try:
        if os.path.isabs(shown) and os.path.samefile(shown, "."):
            return shown
        return os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the working folder of this command no longer exists ({error.strerror}); set another one with --chdir"
        ) from None


class LaunchedCommand(NamedTuple):
    """A command. `least`: the number of nodes that its job needs to continue, 0 if unknown. `most`: the number that
    run at the same time. `endpoint_given`: whether it names its own control plane.
    """

    least: int = 0
    most: int = 0
    endpoint_given: bool = False


def read_command(command: Sequence[str], variables: Mapping[str, str], hosts: int) -> LaunchedCommand:
    """Parse a command. Only `rallyrun` commands are understood.

    `variables` are the `PET_*` variables that the command will have; `hosts` is the default number of nodes.

    Raises:
        SystemExit: a usage error of rallyrun, already printed; or after its help.
        UserError: the number of nodes cannot work.
    """
    is_given = "PET_RDZV_ENDPOINT" in variables
    if os.path.basename(command[0]) != "rallyrun":
        return LaunchedCommand(endpoint_given=is_given)
    parser = build_parser()
    parser.prog = "rallyrun"
    options, _ = parse_with(parser, command[1:], {"PET_NNODES": str(hosts), **variables})
    if options.standalone:
        return LaunchedCommand(endpoint_given=is_given)
    source = options.source("nnodes")
    least, most = parse_nnodes(options.nnodes, source)
    if least > hosts:
        raise UsageError(
            f"{source}={options.nnodes} needs {least} nodes, but {hosts} host{' is' if hosts == 1 else 's are'} "
            f"listed; list more hosts, or remove {source}"
        )
    return LaunchedCommand(least, most, is_given or "rdzv_endpoint" in options.sources)
