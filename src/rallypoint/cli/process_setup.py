"""What a command sees to before it imports anything: the descriptors and signals that its process was born with.

Only built-in modules are used, since until this is done a ^C would end an import in the middle, with a traceback.
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
    """Make this process that of a command: call it first, once, and only where the process does nothing else.

    Standard descriptors that are closed become /dev/null: else whatever is opened next would take their numbers, and
    workers would write into it. A ^C ends this process at once and in silence, as it does any program that has not set
    about anything yet, until `restore_keyboard_interrupt`. When the interpreter shuts down nothing is left to be
    interrupted.
    """
    import atexit

    signals = _signals()
    if signals.getsignal(_SIGINT) is signals.default_int_handler:
        signals.signal(_SIGINT, signals.SIG_DFL)
    atexit.register(_ignore_interrupts)
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            _open_null(name)  # all below it are open, so it gets this number
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115 - as long as the process


def _open_null(name: str) -> None:
    try:
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    except OSError as error:
        sys.exit(
            f"error: this process was started without {name}, and {os.devnull}, which would take its place, cannot be "
            f"opened ({error.strerror}); make it (`mknod -m 666 {os.devnull} c 1 3`), or give {name}"
        )


def restore_keyboard_interrupt() -> None:
    """From now on a ^C is a KeyboardInterrupt again."""
    signals = _signals()
    if signals.getsignal(_SIGINT) == signals.SIG_DFL:
        signals.signal(_SIGINT, signals.default_int_handler)


def end_by_interrupt() -> None:
    """Let this command's process end, when it does, as a ^C ends any program: by the signal.

    A shell whose script runs the command stops then too, which an exit code would not make it do.
    """
    global _by_interrupt
    _by_interrupt = True


def _ignore_interrupts() -> None:
    """The last that runs before the interpreter goes, as the first that was registered."""
    signals = _signals()
    if _by_interrupt:
        from contextlib import suppress

        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # who read it may have gone
                stream.flush()
        signals.signal(_SIGINT, signals.SIG_DFL)
        os.kill(os.getpid(), _SIGINT)
    for number in (_SIGINT, _SIGTERM):
        signals.signal(number, signals.SIG_IGN)


def _signals() -> Any:
    # `signal` makes enums of all its constants. This is what it is made of.
    return __import__("_signal")
