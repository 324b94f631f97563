"""Targets of `rallyctl launch`: what people write into files of hosts and variables, and what comes over ssh."""

from __future__ import annotations

from contextlib import suppress

from rallypoint.base.errors import UsageError
from rallypoint.remote.environment import file_variables
from rallypoint.remote.hosts import Host, parse_hostfile, parse_hosts
from rallypoint.remote.lines import PrefixedLines
from rallypoint.remote.messages import Ended, Hello, Prepare, decode_answer, decode_request, encode, end_mark
from rallypoint.remote.selection import exclude, include
from rallypoint.remote.ssh_command import SshOptions, why_unreachable
from tests.fuzz.target import Target


def hosts(data: bytes) -> None:
    """A host file, a list of hosts, a selection of them, a file of variables."""
    with suppress(UsageError):
        found = parse_hostfile(data, "hosts")
        assert all(host.target[0] != "-" for host in found)
    known = parse_hosts("a:4,b:2,c")
    text = data.decode(errors="replace")
    for read in (parse_hosts, lambda text: include(known, text), lambda text: exclude(known, text)):
        with suppress(UsageError):
            read(text)
    with suppress(UsageError):
        file_variables(data, "env", {})


def messages(data: bytes) -> None:
    """Lines of a supervisor, of a login shell and of a launcher."""
    for decode in (decode_answer, decode_request):
        with suppress(ValueError):
            decode(data)
    lines = PrefixedLines(b"a: ", end_mark("77"))
    lines.feed(data[: len(data) // 2])
    lines.feed(data[len(data) // 2 :])
    lines.progress_bar()
    lines.finish()
    code = data[0] if data else None
    assert why_unreachable(Host("a"), SshOptions((), "python", 10, 30), code, data).isprintable()


def _hosts() -> list[bytes]:
    return [b"a slots=8 max_slots=9 port=22\nu@b:2\n[fd00::1]:3 # x\n", b"a,b:8,[fd00::1]", b"a:0,1@b", b"A=1\n# x\nB"]


def _messages() -> list[bytes]:
    return [
        encode(Hello("0.1.0", "10.0.0.1")),
        encode(Prepare(["a"], "/", {"A": "1"}, 30, 60, "77")),
        b"line\n" + end_mark("77") + encode(Ended(1, "why")),
        b"ssh: connect to host a port 22: Connection refused\n",
    ]


TARGETS = {
    "hosts": Target(hosts, _hosts, ("remote/hosts.py", "remote/environment.py")),
    "remote-messages": Target(messages, _messages, ("remote/messages.py", "remote/ssh_command.py")),
}
