"""`rallyctl launch`: a command on several hosts, over ssh."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from rallypoint.base.errors import UsageError
from rallypoint.cli.parse import Verb

if TYPE_CHECKING:
    from rallypoint.remote.inputs import Host
    from rallypoint.remote.job import Plan

_LARGEST_FILE = 1024 * 1024
"""Bytes of a host file or a file of variables."""
_TIMES = {"connect_timeout": 3600, "lost_after": 86_400, "grace": 86_400}
"""The most seconds of each."""


def add_launch(verb: Verb) -> None:
    """Make `launch` a verb of `rallyctl`."""
    page = verb(
        "launch",
        "start a job on several hosts over ssh",
        "Start a command, mostly rallyrun, on several hosts over the system's ssh, and stay until it has ended on all "
        "of them. Rallypoint must be installed on each. rallyrun finds there, as PET_* variables, how the nodes meet: "
        "the first host has the control plane, and each node its rank; flags of the command take precedence. Nothing "
        "is started unless every host can be used. ^C ends the job on all hosts, and so does the loss of this "
        "command; a second ^C kills it.",
        "--hosts node1:8,node2:8 -- rallyrun train.py",
        _launch,
    )
    page.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run on each host")
    hosts = page.add_argument_group("hosts")
    hosts.add_argument(
        "--hosts", default="", metavar="LIST", help="hosts, and slots (workers) of each: node1:8,node2:8"
    )
    hosts.add_argument("--hostfile", default="", metavar="FILE", help="file with a host on each line: node1 slots=8")
    command = page.add_argument_group("command")
    env = "variable to hand on: NAME, NAME=VALUE or a pattern such as 'NCCL_*'; may be repeated"
    command.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]", help=env)
    file = "file of NAME=VALUE lines to hand on; may be repeated"
    command.add_argument("--env-file", action="append", default=[], metavar="FILE", help=file)
    command.add_argument("--chdir", default="", metavar="DIR", help="folder there (default: the one of this command)")
    ssh = page.add_argument_group("ssh")
    words = "options for ssh, as one word: --ssh-args='-l me -i key'; may be repeated"
    ssh.add_argument("--ssh-args", action="append", default=[], metavar="ARGS", help=words)
    python = "the Python there that has Rallypoint (default: the path of the one that runs this command)"
    ssh.add_argument("--python", default="", metavar="PATH", help=python)
    for name, default, text in (
        ("connect-timeout", 10, "seconds to connect to a host"),
        ("lost-after", 30, "seconds of silence after which launcher and host take each other for lost"),
        ("grace", 60, "seconds between SIGTERM and SIGKILL on a host whose launcher is lost"),
    ):
        ssh.add_argument(f"--{name}", default=str(default), metavar="S", help=f"{text} (default: {default})")


def _launch(options: argparse.Namespace) -> int:
    plan = _plan(options)
    from rallypoint.base.descriptors import allow_descriptors
    from rallypoint.cli.process_setup import restore_keyboard_interrupt
    from rallypoint.remote.job import launch

    allow_descriptors(3 * len(plan.hosts), f"The connections to {len(plan.hosts)} hosts")
    restore_keyboard_interrupt()
    return launch(plan)


def _plan(options: argparse.Namespace) -> Plan:
    """The launch that the options request. Raises UsageError."""
    import shlex

    from rallypoint.base.secrets import SECRET, launch_secret
    from rallypoint.cli.exit import print_error
    from rallypoint.cli.launched_command import read_command
    from rallypoint.remote.job import Plan
    from rallypoint.remote.ssh import SshOptions

    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UsageError(
            "there is no command; write it behind --: rallyctl launch --hosts node1,node2 -- rallyrun t.py"
        )
    hosts = _hosts(options)
    times = {name: _seconds(options, name) for name in _TIMES}
    words: list[str] = []
    for text in options.ssh_args:
        try:
            words += shlex.split(text)
        except ValueError as error:
            raise UsageError(f"--ssh-args={text!r} cannot be read: {error}; quote it as for a shell") from None
    ssh = SshOptions(tuple(words), options.python or sys.executable, times["connect_timeout"], times["lost_after"])
    variables = _variables(options)
    known = read_command(command, {key: text for key, text in variables.items() if key.startswith("PET_")}, len(hosts))
    if 0 < known.most < len(hosts):
        print_error(
            f"rallyctl: of {len(hosts)} hosts {known.most} run at a time, and the others are spare, by --nnodes"
        )
    # A control plane outside of this launch may have no secret, and would refuse nodes that have one.
    if not {SECRET, f"{SECRET}_FILE"} & variables.keys() and (text := launch_secret(new=not known.endpoint_given)):
        variables[SECRET] = text
    folder = options.chdir or _folder()
    first = known.least > 0 and not known.endpoint_given
    return Plan(hosts, command, folder, variables, ssh, times["grace"], known.least, first)


def _hosts(options: argparse.Namespace) -> list[Host]:
    from rallypoint.remote.inputs import parse_hostfile, parse_hosts

    if bool(options.hosts) == bool(options.hostfile):
        both = "are both given; give one of them" if options.hosts else "are both missing; give one of them"
        raise UsageError(f"--hosts and --hostfile {both}")
    if options.hosts:
        return parse_hosts(options.hosts)
    return parse_hostfile(_read(options.hostfile, "--hostfile"), options.hostfile)


def _variables(options: argparse.Namespace) -> dict[str, str]:
    """The user's variables."""
    from rallypoint.remote.inputs import file_variables, named_variables

    found: dict[str, str] = {}
    for path in options.env_file:
        found |= file_variables(_read(path, "--env-file"), path, os.environ)
    return found | named_variables(options.env, os.environ)


def _read(path: str, flag: str) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise UsageError(f"{flag}={path!r} cannot be read: {error.strerror}; name another") from None
    if len(data) > _LARGEST_FILE:
        raise UsageError(f"{flag}={path!r} has more than {_LARGEST_FILE} bytes; name a smaller file")
    return data


def _seconds(options: argparse.Namespace, name: str) -> int:
    text = str(getattr(options, name))
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= _TIMES[name]):
        flag = name.replace("_", "-")
        raise UsageError(f"--{flag}={text!r} is not a number of seconds; give one from 1 to {_TIMES[name]}")
    return int(text)


def _folder() -> str:
    """The folder of this command, by the name that its user knows: other hosts know it by the same."""
    shown = os.environ.get("PWD", "")
    try:
        if os.path.isabs(shown) and os.path.samefile(shown, "."):
            return shown
        return os.getcwd()
    except OSError as error:
        raise UsageError(f"the folder of this command is gone ({error.strerror}); give one by --chdir") from None
