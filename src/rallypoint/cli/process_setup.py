"""Sets up the descriptors and signals that a command's process has inherited, before any import.

Only built-in modules are used: until this is done, a ^C would end an import with a traceback.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SIGINT, _SIGTERM = 2, 15

_by_interrupt = False


def set_up_process() -> None:
    """Set up this process for a command: call it first, once, and only in a process that does nothing else.

    Closed standard descriptors become /dev/null: otherwise the next opened file would get their numbers, and workers
    would write into it. Until `restore_keyboard_interrupt`, a ^C ends this process at once and silently, as it ends any
    program without a handler. While the interpreter shuts down, signals are ignored. Process 1 of a container becomes
    its init, and the command a child of that.
    """
    import atexit

    signals = _signals()
    if signals.getsignal(_SIGINT) is signals.default_int_handler:
        signals.signal(_SIGINT, signals.SIG_DFL)
    if os.getpid() == 1:
        from rallypoint.cli.container_init import become_container_init

        become_container_init()
    atexit.register(_ignore_interrupts)
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            _open_null(name)  # all lower descriptors are open, so it gets this number
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115 - as long as the process


def _open_null(name: str) -> None:
    try:
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    except OSError as error:
        sys.exit(
            f"error: {name} is closed, and {os.devnull}, its replacement, cannot be opened ({error.strerror}); make it "
            f"(`mknod -m 666 {os.devnull} c 1 3`), or open {name}"
        )


def restore_keyboard_interrupt() -> bool:
    """Make ^C raise KeyboardInterrupt again, until `end_keyboard_interrupt`. Returns whether it did not before."""
    signals = _signals()
    if signals.getsignal(_SIGINT) != signals.SIG_DFL:
        return False
    signals.signal(_SIGINT, signals.default_int_handler)
    return True


def end_keyboard_interrupt() -> None:
    """Make ^C end this process at once and silently again."""
    signals = _signals()
    signals.signal(_SIGINT, signals.SIG_DFL)


def end_by_interrupt() -> None:
    """Make this process end by SIGINT at exit, as programs without a handler do: a shell script that runs it then stops
    too.
    """
    global _by_interrupt
    _by_interrupt = True


def _ignore_interrupts() -> None:
    """Runs last at exit, since it was registered first."""
    signals = _signals()
    if _by_interrupt:
        from contextlib import suppress

        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # it may not have a reader any more
                stream.flush()
        signals.signal(_SIGINT, signals.SIG_DFL)
        os.kill(os.getpid(), _SIGINT)
    for number in (_SIGINT, _SIGTERM):
        signals.signal(number, signals.SIG_IGN)


def _signals() -> Any:
    # The module that `signal` wraps; `signal` makes enums of all its constants.
    return __import__("_signal")
