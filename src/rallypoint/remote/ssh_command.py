"""The command line of ssh for one host, and what its failures mean. Pure."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

from rallypoint.base.log import printable
from rallypoint.remote.hosts import Host

_COUNT = 3
"""Unanswered keep-alive messages after which ssh gives a connection up."""


class SshOptions(NamedTuple):
    """How hosts are reached: `arguments` are ssh's own, `python` is the interpreter there, times are in seconds."""

    arguments: tuple[str, ...]
    python: str
    connect_timeout: int
    lost_after: int


def ssh_command(host: Host, options: SshOptions) -> list[str]:
    """The local command that starts a supervisor on a host.

    The user's arguments come first: of several values of an option, ssh takes the first.
    """
    own = {
        "BatchMode": "yes",  # there is no person to answer
        "ConnectTimeout": str(options.connect_timeout),
        "ServerAliveInterval": str(max(1, options.lost_after // _COUNT)),
        "ServerAliveCountMax": str(_COUNT),
        "ClearAllForwardings": "yes",  # of the user's configuration; hundreds of connections would want one port
        "ControlPath": "none",  # a shared connection has keep-alive messages of its own, or none
        "LogLevel": "ERROR",
    }
    words = ["ssh", *options.arguments, "-T", "-x"]
    for name, value in own.items():
        words += ["-o", f"{name}={value}"]
    if host.port:
        words += ["-p", str(host.port)]
    # -P: the folder where a login begins is not searched for modules.
    remote = ["exec", options.python, "-P", "-m", "rallypoint.remote.supervisor"]
    return [*words, "--", host.target, shlex.join(remote)]


_MEANINGS: tuple[tuple[str, str], ...] = (
    ("could not resolve hostname", "its name is not known here; look at its spelling, /etc/hosts and ~/.ssh/config"),
    ("connection refused", "no ssh server listens there; start sshd, or give its port"),
    ("timed out", "nobody answers; look whether it is up, and at firewalls between here and there"),
    ("no route to host|network is unreachable", "no way leads there; look at the network and at firewalls"),
    (
        "host key verification failed|identification has changed|host key is known",
        "its key is not the one in ~/.ssh/known_hosts, or none is there; connect once by hand: ssh {target}",
    ),
    ("permission denied", "it accepts no key of yours; see that 'ssh -o BatchMode=yes {target} true' works"),
    ("too many authentication failures", "it was offered too many keys; name one by --ssh-args='-i FILE'"),
    (
        "no module named|modulenotfounderror",
        "Rallypoint is not installed for {python} there; install it, or name another by --python",
    ),
    ("unknown option.*-p", "{python} there is older than Python 3.11; name another by --python"),
    ("bad configuration option|illegal option|unknown option", "ssh does not know an option; look at --ssh-args"),
)
"""What ssh or the login shell says, and what to do; the first row that is found counts."""

_BUSY = re.compile(rb"kex_exchange_identification|connection (closed|reset) by", re.IGNORECASE)


def is_busy(code: int | None, said: bytes) -> bool:
    """Whether a server has turned ssh away as it does when it has too many new connections (sshd's MaxStartups)."""
    return code == _SSH_FAILED and _BUSY.search(said) is not None


_NOT_FOUND, _CANNOT_RUN, _SSH_FAILED = 127, 126, 255


def why_unreachable(host: Host, options: SshOptions, code: int | None, said: bytes) -> str:
    """Why there is no supervisor on a host: the end of a sentence that begins with the host.

    Args:
        code: ssh's exit code; None if it has not ended in time.
        said: what it and the login shell have written.
    """
    lines = [printable(line.strip()) for line in said.decode(errors="replace").splitlines() if line.strip()]
    quoted = f" ({lines[-1]})" if lines else ""
    found = "\n".join(lines).lower()
    about = {"target": host.target, "python": options.python}
    if code is None:
        return (
            f"has not answered in time{quoted}; look at its load and its login shell, or give more by --connect-timeout"
        )
    for pattern, meaning in _MEANINGS:
        if re.search(pattern, found):
            return f"cannot be used: {meaning.format(**about)}{quoted}"
    if code in (_NOT_FOUND, _CANNOT_RUN):
        return f"cannot be used: {options.python} cannot be run there; name its Python by --python{quoted}"
    if code == _SSH_FAILED:
        return f"cannot be reached{quoted or ': ssh ended with exit code 255'}"
    return f"cannot be used: its login shell ended with exit code {code} before Rallypoint ran{quoted}"
