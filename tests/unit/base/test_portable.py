"""What stands in for Linux's calls does what they do: each is held against Linux's own here."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rallypoint.base import kernel, portable
from rallypoint.base.poll import readable

pytestmark = pytest.mark.process

BOTH = pytest.mark.parametrize("system", [kernel, portable], ids=["Linux", "portable"])
DEADLINE = 30.0


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@BOTH
def test_the_end_of_a_child_is_seen_before_it_is_reaped(system: ModuleType, child: subprocess.Popen[bytes]) -> None:
    fd = system.pidfd_open(child.pid)
    try:
        assert not readable(fd)
        system.send_signal(fd, child.pid, signal.SIGTERM)
        assert readable(fd, DEADLINE)
        assert system.exit_of_child(fd, child.pid) == -signal.SIGTERM
        assert child.wait() == -signal.SIGTERM, "it was left to be reaped"
        with pytest.raises(ProcessLookupError):
            system.send_signal(fd, child.pid, signal.SIGTERM)
    finally:
        os.close(fd)
    with pytest.raises(ProcessLookupError):
        system.pidfd_open(child.pid)


@BOTH
def test_the_end_of_somebody_elses_child_is_seen(system: ModuleType) -> None:
    text = (
        "import subprocess, sys; child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); "
        "sys.stdin.read(); child.kill(); child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        fd = system.pidfd_open(int(parent.stdout.readline()))
        assert not readable(fd)
        parent.stdin.close()
        assert readable(fd, DEADLINE)
        os.close(fd)


def test_nobody_looks_at_a_process_for_which_nobody_waits(child: subprocess.Popen[bytes]) -> None:
    os.close(portable.pidfd_open(child.pid))
    until = time.monotonic() + DEADLINE
    while any(each.name == "rallypoint-exit" for each in threading.enumerate()):
        assert time.monotonic() < until, "the thread goes on"
        threading.Event().wait(0.01)


OWNER = """
import os, socket, sys
from {module} import own_descriptor
socket.send_fds(socket.socket(fileno={socket}), [b"x"], [own_descriptor()])
copy = os.fork()  # which does not stand for it
if copy == 0:
    os.execvp("sleep", ["sleep", "600"])
print(copy, flush=True)
sys.stdin.read()
"""


@BOTH
def test_the_end_of_this_process_is_seen_by_whom_it_is_given(system: ModuleType) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        text = OWNER.format(module=system.__name__, socket=theirs.fileno())
        command = [sys.executable, "-c", text]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[theirs.fileno()]
        ) as owner:
            assert owner.stdout is not None
            assert owner.stdin is not None
            (fd,) = socket.recv_fds(ours, 1, 1)[1]
            copy = int(owner.stdout.readline())
            try:
                assert not readable(fd)
                owner.stdin.close()
                assert readable(fd, DEADLINE)
                os.kill(copy, 0)
            finally:
                os.kill(copy, signal.SIGKILL)
                os.close(fd)


@BOTH
def test_a_poller(system: ModuleType) -> None:
    poller = system.new_poller()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        poller.register(ours, 1)
        assert poller.poll(0) == []
        theirs.send(b"x")
        assert poller.poll(DEADLINE, 16) == [(ours.fileno(), 1)]
        poller.modify(ours, 4)
        assert poller.poll(None) == [(ours.fileno(), 4)]
        poller.modify(ours, 0)
        assert poller.poll(0.01) == []
        theirs.close()
        ((fd, events),) = poller.poll(DEADLINE)
        assert (fd, events & 16) == (ours.fileno(), 16), "that the other end is gone is told unasked"
        poller.unregister(ours)
        assert poller.poll(0) == []
    poller.close()


@BOTH
def test_a_wakeup(system: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "wakeup_pair", system.wakeup_pair)
    wakeup = kernel.Wakeup()
    wakeup.clear()
    assert not readable(wakeup.fileno())
    for _ in range(20_000):  # more than a pipe holds
        wakeup.set()
    assert readable(wakeup.fileno())
    while readable(wakeup.fileno()):
        wakeup.clear()
    wakeup.close()
    wakeup.close()
    assert wakeup.fileno() == -1


@BOTH
def test_waiting_for_a_signal(system: ModuleType) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        assert system.wait_for_signal({signal.SIGUSR2}, 0.01) is None
        signal.raise_signal(signal.SIGUSR2)
        assert system.wait_for_signal({signal.SIGUSR2}, DEADLINE) == signal.SIGUSR2
        assert signal.SIGUSR2 not in signal.sigpending()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@BOTH
def test_sockets_by_which_agents_are_found(system: ModuleType) -> None:
    name = f"rallypoint/test/{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as asking:
        listener.bind(system.socket_address(name))
        listener.listen()
        assert name in system.socket_names()
        asking.connect(system.socket_address(name))
        assert system.uid_of_peer(asking) == os.getuid()
        system.remove_socket(listener.getsockname())
    assert name not in system.socket_names()


def test_a_folder_for_sockets_that_others_can_open_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "SOCKETS", f"{tmp_path}/rallypoint-")
    folder = tmp_path / f"rallypoint-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="a folder of this user alone"):
        portable.socket_address("any")


def test_each_name_has_its_stand_in() -> None:
    assert [each for each in kernel.__all__ if not hasattr(portable, each)] == []
