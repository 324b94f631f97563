"""Sets up the descriptors and signals that a command's process inherited, before any import.

Uses built-in modules only: until this is done, a ^C would end an import with a traceback.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as signals
    from typing import Any
else:
    import _signal as signals  # the C module: `signal` creates enums of all its constants

_by_interrupt = False


def set_up_process() -> None:
    """Set up this process for a command. Call this first, once, and only in a process that the command owns.

    Closed standard descriptors become /dev/null: otherwise files opened later would get their numbers, and workers
    would write into them. Until `restore_keyboard_interrupt`, a ^C ends this process immediately and silently, like
    any program without a handler. While the interpreter shuts down, signals are ignored, and output without a reader
    is dropped. Process 1 of a container becomes its init, and the command a child of it.
    """
    import atexit

    if signals.getsignal(signals.SIGINT) is signals.default_int_handler:
        signals.signal(signals.SIGINT, signals.SIG_DFL)
    if os.getpid() == 1:
        from rallypoint.cli.container_init import become_container_init

        become_container_init()
    atexit.register(_end_process)
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            _open_null(name)  # all lower descriptors are open, so it gets this number
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115 - open as long as the process


def _open_null(name: str) -> None:
    try:
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    except OSError as error:
        sys.exit(
            f"error: {name} is closed, and {os.devnull}, its replacement, cannot be opened ({error.strerror}); make it "
            f"(`mknod -m 666 {os.devnull} c 1 3`), or open {name}"
        )


def restore_keyboard_interrupt() -> bool:
    """Make ^C raise KeyboardInterrupt again, until `end_keyboard_interrupt`. Returns whether this is a change."""
    if signals.getsignal(signals.SIGINT) != signals.SIG_DFL:
        return False
    signals.signal(signals.SIGINT, signals.default_int_handler)
    return True


def end_keyboard_interrupt() -> None:
    signals.signal(signals.SIGINT, signals.SIG_DFL)


def end_by_interrupt() -> None:
    """Make this process end by SIGINT at exit, like programs without a handler, so that a calling shell script stops
    too.
    """
    global _by_interrupt
    _by_interrupt = True


def drop_output(stream: Any) -> None:
    """Redirect a stream that cannot be written to /dev/null, along with its buffered contents.

    The interpreter flushes standard output and error when it exits. If that fails, it prints an error and replaces the
    command's exit code with 120.
    """
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)
    except (OSError, ValueError):  # /dev/null or a descriptor is missing; None is not flushed
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is stream:
                setattr(sys, name, None)


def _end_process() -> None:
    if _by_interrupt:
        _flush_output()
        signals.signal(signals.SIGINT, signals.SIG_DFL)
        os.kill(os.getpid(), signals.SIGINT)
    for number in (signals.SIGINT, signals.SIGTERM):
        signals.signal(number, signals.SIG_IGN)
    _flush_output()


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # closed, or nobody reads it
            drop_output(stream)
