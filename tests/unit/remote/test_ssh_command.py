"""The ssh command of a host, and its failures."""

from __future__ import annotations

import pytest

from rallypoint.clusters.remote.inputs import Host
from rallypoint.clusters.remote.ssh import SshOptions, ssh_command, why_unreachable

OPTIONS = SshOptions(("-i", "key", "-o", "BatchMode=no"), "/opt/my venv/bin/python", 10, 30)


def test_the_user_s_options_come_first() -> None:
    command = ssh_command(Host("node1", user="me"), OPTIONS)
    assert command[:5] == ["ssh", "-i", "key", "-o", "BatchMode=no"]
    assert command.index("BatchMode=no") < command.index("BatchMode=yes")
    assert command[-3:] == [
        "--",
        "me@node1",
        "exec '/opt/my venv/bin/python' -P -m rallypoint.clusters.remote.supervisor",
    ]
    assert "ServerAliveInterval=10" in command


@pytest.mark.parametrize(
    ("code", "stderr", "words"),
    [
        (255, "ssh: Could not resolve hostname n: Name or service not known", "its name is not known here"),
        (255, "ssh: connect to host n port 22: Connection refused", "no ssh server listens there"),
        (255, "ssh: connect to host n port 22: Connection timed out", "no answer"),
        (255, "ssh: connect to host n port 22: No route to host", "there is no route to it"),
        (255, "ssh: connect to host n port 22: Network is unreachable", "there is no route to it"),
        (255, "Host key verification failed.", "connect once by hand: ssh me@n"),
        (255, "me@n: Permission denied (publickey).", "it accepts none of your keys"),
        (255, "Connection closed by 10.0.0.1 port 22", "cannot be reached (Connection closed by 10.0.0.1 port 22)"),
        (255, "", "cannot be reached: ssh exited with code 255"),
        (127, "sh: 1: exec: py: not found", "py cannot be run there; name its Python with --python (sh: 1:"),
        (1, "py: No module named rallypoint", "Rallypoint is not installed for py there"),
        (2, "unknown option -P\nusage: py [option]", "older than Python 3.11"),
        (1, "This account is currently not available.", "its login shell exited with code 1"),
        (0, "", "its login shell exited with code 0"),
        (None, "", "did not answer in time"),
        (255, "\x1b[31mred\n", "cannot be reached (?[31mred)"),
    ],
)
def test_why_unreachable(code: int | None, stderr: str, words: str) -> None:
    text = why_unreachable(Host("n", user="me"), SshOptions((), "py", 10, 30), code, stderr.encode())
    assert words in text
    assert text.isprintable()
