"""Finds what a process is waiting for, without stopping it: a terminal, a pipe, a lock, an address.

The sources are `/proc` and the main thread from `base.python_memory`. A refused connection leaves no trace in the
kernel, and the process tries again after a pause. So an address is also taken from the arguments of the innermost call.
The machine's table of sockets shows whether anything listens there.
"""

from __future__ import annotations

import ipaddress
import os
import platform
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

from rallypoint.base.log import printable
from rallypoint.base.procfs import read_text
from rallypoint.base.python_memory import PythonThread

CALLS = {
    "x86_64": "0 read 1 write 7 poll 16 ioctl 23 select 35 nanosleep 42 connect 43 accept 44 sendto 45 recvfrom "
    "46 sendmsg 47 recvmsg 56 clone 58 vfork 61 wait4 72 fcntl 73 flock 74 fsync 75 fdatasync 202 futex "
    "230 clock_nanosleep 232 epoll_wait 247 waitid 257 openat 262 newfstatat 270 pselect6 271 ppoll 281 epoll_pwait "
    "288 accept4",
    "aarch64": "22 epoll_pwait 25 fcntl 29 ioctl 32 flock 56 openat 63 read 64 write 72 pselect6 73 ppoll "
    "79 newfstatat 82 fsync 83 fdatasync 95 waitid 98 futex 101 nanosleep 115 clock_nanosleep 202 accept 203 connect "
    "206 sendto 207 recvfrom 211 sendmsg 212 recvmsg 220 clone 242 accept4 260 wait4",
}
"""System calls in which programs often wait, by machine and number."""

_LISTEN, _CONNECTING = "0A", "02"
_READS, _WRITES, _LOCKS = {"read", "recvfrom", "recvmsg"}, {"write", "sendto", "sendmsg"}, {"flock", "fcntl"}
_MOST_FILES = 4096
_PROMPTS = (
    ("/IPython/terminal/debugger.py", "cmdloop", "it is at a prompt of ipdb"),
    ("/pdb.py", "interaction", "it is at a prompt of pdb"),
    ("/pydevd.py", "do_wait_suspend", "it is paused by its debugger"),
    ("/pydevd.py", "_wait_for_attach", "it is waiting for a debugger to attach"),
)
"""Where a debugger stops the program: file and function. Its other functions are below every debugged program."""


class _Socket(NamedTuple):
    host: str
    port: int
    state: str
    inode: str


def waits_for(pid: int, main: PythonThread | None) -> str:
    """Say what a process's main thread is waiting for; empty if its stack already tells everything."""
    if main is not None and (prompt := _prompt(main)):
        return prompt
    call, fd = _system_call(pid)
    if fd is not None and (text := _on_descriptor(pid, call, fd)):
        return text
    tables = [_Sockets(pid, family) for family in ("tcp", "tcp6")]
    for table in tables:
        for socket in table.connecting():
            return f"it is trying to connect to {_address(socket.host, socket.port)}, which does not answer"
    if main is None or not main.frames:
        return ""
    host, port = _address_in(main.arguments)
    if not host or any(table.has_other_use(port) for table in tables):
        return ""
    return f"it is trying to connect to {_address(host, port)}{', where nothing listens' if _is_local(host) else ''}"


def _prompt(main: PythonThread) -> str:
    """A text if it is at a debugger's prompt or waiting for a debugger; empty otherwise."""
    for frame in main.frames:
        for file, function, sentence in _PROMPTS:
            if frame.file.endswith(file) and frame.function.rpartition(".")[2] == function:
                return sentence
    return ""


def _system_call(pid: int) -> tuple[str, int | None]:
    """The main thread's system call and its first argument; empty if not readable."""
    fields = read_text(f"/proc/{pid}/syscall").split()
    name = call_name(fields[0]) if len(fields) > 2 else ""
    return name, int(fields[1], 16) if name else None


def call_name(number: str) -> str:
    """The name of this machine's system call with a number; empty for calls in which programs seldom wait."""
    calls = CALLS.get(platform.machine(), "").split()
    return dict(zip(calls[::2], calls[1::2], strict=True)).get(number, "")


def _on_descriptor(pid: int, call: str, fd: int) -> str:
    with suppress(OSError):
        target = os.readlink(f"/proc/{pid}/fd/{fd}")
        path = printable(target)
        if call in _READS:
            if fd == 0:
                terminal = target.startswith(("/dev/pts/", "/dev/tty", "/dev/console"))
                return f"it is waiting for input {'at the terminal' if terminal else 'on its standard input'}"
            what = "a pipe" if target.startswith("pipe:") else path if path[0] == "/" else ""
            return f"it is reading {what}" if what else ""
        if call in _WRITES and fd in (1, 2):
            return "it is writing to its console, which is full"
        if call in _WRITES and path.startswith("/"):
            return f"it is writing {path}"
        if call in _LOCKS and path.startswith("/"):
            return f"it is waiting for the lock of {path}"
    return ""


def _address_in(arguments: Sequence[str | int]) -> tuple[str, int]:
    """A host followed by a port; empty if no such pair exists."""
    for host, port in pairwise(arguments):
        if isinstance(host, str) and isinstance(port, int) and 0 < port < 65536 and _is_host(host):
            return host, port
    return "", 0


def _is_host(text: str) -> bool:
    if not 0 < len(text) <= 255 or text.startswith(("/", "-", ".")):
        return False
    return all(character.isalnum() or character in ".:-_[]" for character in text)


def _is_local(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host in ("localhost", os.uname().nodename)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Sockets:
    """The sockets of one family in a process's network."""

    def __init__(self, pid: int, family: str) -> None:
        self._pid = pid
        self._lines = read_text(f"/proc/{pid}/net/{family}").splitlines()[1:]

    def connecting(self) -> Iterator[_Socket]:
        """The process's sockets that are waiting for the peer's answer."""
        found = [line for line in self._lines if f" {_CONNECTING} " in line]
        own = _own_sockets(self._pid) if found else ()
        for line in found:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _CONNECTING and fields[9] in own:
                host, _, port = fields[2].partition(":")
                yield _Socket(_host(host), int(port, 16), fields[3], fields[9])

    def has_other_use(self, port: int) -> bool:
        """Whether something listens on this port or is connected to it; nothing then waits for it."""
        return any(line.split()[1].endswith(f":{port:04X}") for line in self._lines if f" {_LISTEN} " in line)


def _own_sockets(pid: int) -> Collection[str]:
    found = set()
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd")[:_MOST_FILES]:
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                found.add(target.removeprefix("socket:[").rstrip("]"))
    return found


def _host(text: str) -> str:
    """Decode an address from the kernel: words of four bytes, each in this machine's order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
