"""Makes process 1 of a container an init, like `tini`, and runs the command as its child.

The kernel treats process 1 specially. Orphans of the whole container become its children (left by the image's
entrypoint, or started by `kubectl exec`). A signal without a handler is lost, such as a SIGTERM that arrives before the
handlers are installed. Laws:

1. Every ended process is reaped, whichever process started it.
2. A signal to process 1 is forwarded to the command, once. A terminal sends its signals to both processes. But when it
   is closed, it sends SIGHUP only to its session's leader, which usually is process 1.
3. Process 1 ends when the command does, with its code, or 128 plus the signal's number. The kernel then kills the rest.
   If a signal killed the command, process 1 stays for a moment, in which the reaper ends the command's leftovers.
4. Use built-in modules only, since this runs before the command's imports, and the copy should be small.
"""

from __future__ import annotations

import posix
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as signals
else:
    import _signal as signals  # the C module: `signal` creates enums of all its constants

_LAST_TIMEOUT = 2.0
"""Seconds that process 1 waits for the leftovers of a killed command."""


def become_container_init() -> None:
    """Continue in a child, or in this process if it cannot fork. Call this before starting threads."""
    mask = signals.pthread_sigmask(signals.SIG_BLOCK, signals.valid_signals())
    handler = signals.signal(signals.SIGCHLD, signals.SIG_DFL)  # if SIGCHLD is ignored, the kernel discards exit codes
    try:
        command = posix.fork()
    except OSError:
        command = 0
    if command:
        posix._exit(_run_init(command))
    signals.signal(signals.SIGCHLD, handler)
    signals.pthread_sigmask(signals.SIG_SETMASK, mask)


def _run_init(command: int) -> int:
    """Forward signals and reap until the command ends. Returns its exit code, as a shell would."""
    code, _ = _reap(command)  # no signal reports children that ended earlier
    while code is None:
        received = signals.sigwaitinfo(signals.valid_signals())
        if received.si_signo == signals.SIGCHLD:
            code, _ = _reap(command)
        elif received.si_code <= 0 or _is_for_leader(received.si_signo):  # otherwise the kernel sent it to both
            posix.kill(command, received.si_signo)
    if code >= 0:
        return code
    until = time.monotonic() + _LAST_TIMEOUT
    while _reap(command)[1] and (seconds := until - time.monotonic()) > 0:
        signals.sigtimedwait([signals.SIGCHLD], seconds)
    return 128 - code


def _is_for_leader(number: int) -> bool:
    """Whether the kernel sent this signal to process 1 only."""
    return number == signals.SIGHUP and posix.getsid(0) == posix.getpid()


def _reap(command: int) -> tuple[int | None, bool]:
    """Reap all ended processes.

    Returns:
        The command's exit code, -N for signal N, if it was among them; and whether other children remain.
    """
    code = None
    while True:
        try:
            pid, status = posix.waitpid(-1, posix.WNOHANG)
        except ChildProcessError:
            return code, False
        if pid == 0:
            return code, True
        if pid == command:
            code = posix.waitstatus_to_exitcode(status)
