"""Targets of `rallyctl launch`: what people write into files of hosts and variables, and what comes over ssh."""

from __future__ import annotations

from contextlib import suppress

from rallypoint.base.errors import UsageError
from rallypoint.clusters.remote.inputs import Host, file_variables, parse_hostfile, parse_hosts
from rallypoint.clusters.remote.messages import Ended, Hello, Prepare, decode_answer, decode_request, encode, end_mark
from rallypoint.clusters.remote.output import PrefixedLines
from rallypoint.clusters.remote.ssh import SshOptions, why_unreachable
from tests.fuzz.target import Target


def hosts(data: bytes) -> None:
    """A host file, a list of hosts, a file of variables."""
    with suppress(UsageError):
        found = parse_hostfile(data, "hosts")
        assert all(host.target[0] != "-" for host in found)
    with suppress(UsageError):
        parse_hosts(data.decode(errors="replace"))
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
    return [b"a slots=8\nu@b:2\n[fd00::1]:3 # x\n", b"a,b:8,[fd00::1]", b"A=1\n# x\nB"]


def _messages() -> list[bytes]:
    return [
        encode(Hello("0.1.0", "10.0.0.1")),
        encode(Prepare(["a"], "/", {"A": "1"}, 30, 60, "77")),
        b"line\n" + end_mark("77") + encode(Ended(1, "why")),
        b"ssh: connect to host a port 22: Connection refused\n",
    ]


TARGETS = {
    "hosts": Target(hosts, _hosts, ("clusters/remote/inputs.py",)),
    "remote-messages": Target(messages, _messages, ("clusters/remote/messages.py", "clusters/remote/ssh.py")),
}
