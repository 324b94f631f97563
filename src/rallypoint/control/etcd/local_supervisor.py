"""Supervises a temporary etcd; run as a program, with nothing but the standard library and the kernel's calls.

    local_supervisor.py PID FOLDER COMMAND...

It runs the command, kills it on SIGTERM or when the process PID ends in any way, and removes FOLDER. If the supervisor
is killed, the kernel kills the command.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys

if __name__ == "__main__":  # without site-packages, it finds the package from its own path
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))


TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def main(owner: int, folder: str, command: list[str]) -> int:
    """Run the command; returns its exit code, negative for a signal."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    ends = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in (*ends, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the owner might have blocked signals, and etcd would inherit that
    libc = ctypes.CDLL(None)
    # Request SIGCHLD when the owner ends, or only the thread that started us.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGCHLD)
    try:
        if os.getppid() != owner:
            return 0
        # This process has no other thread, so the child can run code before the program.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent(libc))  # noqa: PLW1509
        received: set[int] = set()
        while process.poll() is None and os.getppid() == owner and not received.intersection(ends):
            received.update(os.read(reader, 4096))
        process.kill()
        return process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _die_with_parent(libc: ctypes.CDLL) -> Callable[[], None]:
    supervisor = os.getpid()

    def tie() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)

    return tie


if __name__ == "__main__":
    code = main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
    sys.exit(code if code >= 0 else 128 - code)
