"""Facts about a supervisor's host: its address, a free port, and whether a command can run."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import sys

from rallypoint.base.endpoint import Endpoint, source_address, unmapped_address
from rallypoint.base.procfs import local_port_range
from rallypoint.cluster.ports import control_port
from rallypoint.remote.messages import Found, Prepare, Refused

CANNOT_START = 126
"""The shell's code for a command that is there and cannot be run."""
SIGNALS = frozenset(
    {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGKILL}
)
"""The signals that a launcher may send a command."""

_PORTS = 65_536
_ATTEMPTS = 64

_held: list[socket.socket] = []
"""Keeps the port from others until this process ends: rallyrun, which allows it (SO_REUSEADDR), can bind it."""


def address() -> str:
    """The address at which sshd here was reached; empty if it does not say."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return unmapped_address(words[2].partition("%")[0]) if len(words) == 4 else ""


def find_endpoint(towards: str) -> Found | Refused:
    """An address of this host and a port that is free, and stays so.

    Args:
        towards: the address of another host, by which ours is found; empty for that at which we were reached.
    """
    try:
        chosen = source_address(Endpoint(towards, 9)) if towards else address() or "127.0.0.1"
        held = _bind_free_port()
    except OSError as error:
        where = f" towards {towards}" if towards else ""
        return Refused(f"has no address and port for the rendezvous{where}: {error.strerror or error}")
    _held.append(held)
    return Found(chosen, int(held.getsockname()[1]))


def _bind_free_port() -> socket.socket:
    """A port outside the range from which the kernel takes ports for outgoing connections, if there is one."""
    ephemeral = local_port_range()  # where that is empty, the kernel's default counts
    for _ in range(_ATTEMPTS):
        port, outside = control_port(random.randrange(_PORTS), ephemeral=ephemeral)
        if outside:
            with contextlib.suppress(OSError):
                return _bound(port)
    return _bound(0)


def _bound(port: int) -> socket.socket:
    """A socket on this port at all addresses. Raises OSError if anybody has the port at any of them."""
    made = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind(("", port))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except BaseException:
        made.close()
        raise
    return made


def prepare(job: Prepare) -> Refused | None:
    """Go to the command's folder and take over its environment; returns why it cannot be run, None if it can."""
    folder = _native(job.folder)
    try:
        os.chdir(folder)
    except OSError as error:
        return Refused(
            f"has no folder {folder!r} to run in ({error.strerror}); make it there, or give another by --chdir"
        )
    os.environ["PWD"] = folder
    # As in an activated virtual environment: what is installed beside this Python is found.
    beside = os.path.dirname(sys.executable)
    os.environ["PATH"] = os.pathsep.join(filter(None, (beside, os.environ.get("PATH", os.defpath))))
    try:
        os.environ.update((_native(name), _native(value)) for name, value in job.environment.items())
    except ValueError as error:
        return Refused(f"cannot take over the environment: {error}; look at --env and --env-file")
    program = _native(job.command[0])
    if shutil.which(program) is None:
        return Refused(f"does not find the program {program!r}; give a path, or name the Python beside it by --python")
    return None


def arguments(job: Prepare) -> list[str]:
    """The command as this host's system calls take it."""
    return [_native(each) for each in job.command]


def _native(text: str) -> str:
    """A text of `messages.portable` in the encoding of this host's names."""
    return os.fsdecode(text.encode("latin-1"))
