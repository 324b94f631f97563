"""A wrapped worker, as one process of its context.

Laws:

1. The worker runs as long as the wrapper: what the wrapper writes after the program ends belongs to the run.
2. Signals and inspections apply to the program while it is known and running. Before it is found, they apply to the
   wrapper. After the program ends, the wrapper is left alone, so that it can write, until the stop asks for stacks and
   kills.
3. A wrapper cannot hide a failure if the kernel reports how the program ended.
"""

from __future__ import annotations

import math
import os
import threading
from contextlib import suppress
from signal import SIGABRT, SIGKILL
from typing import NamedTuple

from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.kernel import readable, until_readable
from rallypoint.base.open_process import open_process
from rallypoint.base.process_handle import ProcessHandle
from rallypoint.features.wrap.program import ProgramName, command_line, environment, exit_code, find_program
from rallypoint.workers.process import AdoptedProcess
from rallypoint.workers.reaper.client import ExitStatus, ReaperClient

_PAUSE, _LONGEST_PAUSE, _SHARE = 0.002, 2.0, 0.01
"""Minimum and maximum seconds between looks for the program, and their share of the time since the wrapper started. A
program that runs for a shorter time is not found, and its wrapper can hide how it ended."""
_LONGEST_WAIT = 60.0
"""Seconds until the next look, even if no descriptor shows a change."""
_END_WINDOW = 5.0
"""Seconds after a wrapper ended with success in which its program must end: py-spy does not wait for a program that is
about to end."""


class Wrapped(NamedTuple):
    """What was started: the wrapper's `name`, for messages; the command lines of both; the variables that distinguish
    this worker's program from others; and where it writes its error file."""

    name: str
    wrapper: ProgramName
    program: ProgramName
    variables: dict[str, str]
    error_file: str


class WrappedProcess(AdoptedProcess):
    """A wrapped worker's process. Any thread may inspect it.

    Args:
        reaper, handle: the wrapper's.
        wrapped: what was started.
    """

    def __init__(self, reaper: ReaperClient, handle: ProcessHandle, wrapped: Wrapped) -> None:
        super().__init__(reaper, handle)
        self._wrapped = wrapped
        self._looking = threading.Lock()
        self._began = self._look_at = SYSTEM_CLOCK.monotonic()
        self._is_program = wrapped.program == wrapped.wrapper
        """Whether the wrapper became the program by `exec`."""
        self._program: ProcessHandle | None = None
        """The program, if it is another process."""
        self._end_noted = False
        self._program_code: int | None = None
        """How the program ended, if the kernel reported it."""
        self._own_code: int | None = None
        """The wrapper's exit code, once it ends."""
        self._ended = 0.0

    # The program

    @property
    def program_pid(self) -> int:
        program = self._found()
        return self.pid if program is None or (self.exitcode is None and _has_ended(program)) else program.pid

    @property
    def program_code(self) -> int | None:
        return self._program_code if self.exitcode is None else None

    def watch(self) -> None:
        """Find the program, and note how it ended, until the wrapper ends. Runs on its own thread."""
        while (own := self.fileno()) >= 0 and not readable(own):
            fd = self._look()
            seconds = min(self._next_look() - SYSTEM_CLOCK.monotonic(), _LONGEST_WAIT)
            until_readable([own, *([fd] if fd >= 0 else [])], seconds)

    def _look(self) -> int:
        """Find the program if that is due, and note how it ended. Returns a descriptor that is readable when there is
        more to note; -1 for none."""
        program = self._found()
        with self._looking:
            fd = -1 if program is None or self._end_noted else program.fileno()
            if program is None or fd < 0 or not readable(fd):
                return fd
            self._program_code, self._end_noted = exit_code(program.pid, fd), True
            return -1

    def _next_look(self) -> float:
        return math.inf if self._is_program or self._program is not None else self._look_at

    def _found(self, *, now: bool = False) -> ProcessHandle | None:
        """Return the program if it is another process; look for it if that is due, or `now`."""
        with self._looking:
            time = SYSTEM_CLOCK.monotonic()
            if (now or time >= self._next_look()) and self.exitcode is None and self._next_look() < math.inf:
                self._look_at = time + min(max(_PAUSE, _SHARE * (time - self._began)), _LONGEST_PAUSE)
                self._find()
            return self._program

    def _find(self) -> None:
        pid = find_program(self.pid, self._wrapped.program, self._wrapped.wrapper)
        if pid == self.pid:
            self._is_program = True
        else:
            self._take(pid)

    def _take(self, pid: int | None) -> None:
        if pid is None:
            return
        with suppress(OSError):  # it ended, or no descriptor is free
            handle = open_process(pid)
            # Another process might have the pid by now. This check shows it, unless that process or the program ended.
            if self._wrapped.program.fits(command_line(pid)) or readable(handle.fileno()):
                self._program = handle
            else:
                handle.close()

    # Signals

    def forward_signal(self, number: int) -> None:
        program = self._found(now=True)
        if program is None or self.exitcode is not None or not self._reached(program, number):
            super().forward_signal(number)

    def _reached(self, program: ProcessHandle, number: int) -> bool:
        """Send a signal to the program. Returns whether the wrapper must not get it too (law 2)."""
        if _has_ended(program):
            return number not in (SIGABRT, SIGKILL)
        try:
            program.send_signal(number)
        except ProcessLookupError:
            pass
        except PermissionError:  # it runs as another user, whom its wrapper can signal
            return False
        return number != SIGKILL

    def release(self) -> None:
        super().release()
        with self._looking:  # a thread might be looking at its descriptor, whose number another file could get
            if self._program is not None:
                self._program.close()

    # The end

    def _exit_status(self) -> ExitStatus:
        if self._own_code is None:
            status = super()._exit_status()
            if not status.final or status.code is None:
                return status
            self._own_code, self._ended = status.code, SYSTEM_CLOCK.monotonic()
            self._find_left()
        self._look()
        left = self._own_code == 0 and not self.signalled and self._program_runs()
        if left and SYSTEM_CLOCK.monotonic() < self._ended + _END_WINDOW:
            return ExitStatus(False, None)
        return ExitStatus(True, self._judged(self._own_code, left=left))

    def _judged(self, code: int, *, left: bool) -> int:
        """The worker's exit code after its wrapper ended with this one. `left`: the program is still running."""
        name, how = self._wrapped.name, self._program_code
        if left and self._program is not None:
            self.fault = (
                f"its wrapper {name} exited while the program behind it (pid {self._program.pid}) was still running; "
                "use a wrapper that waits for its program or replaces itself with it (exec)"
            )
            return 1
        if how and how != code:
            self.remark = f"its wrapper {name} exited with code {code}"
            return how
        if code and how == 0:
            self.remark = f"this is the exit code of its wrapper {name}; the program behind it succeeded"
        elif code == 0 and how is None and not self._is_program and _is_there(self._wrapped.error_file):
            self.remark = f"its wrapper {name} exited with code 0"
            return 1
        return code

    def _program_runs(self) -> bool:
        return self._program is not None and not _has_ended(self._program)

    def _find_left(self) -> None:
        """Find a program that its wrapper left at once: it is somewhere below the reaper."""
        with self._looking:
            if not self._is_program and self._program is None:
                self._take(find_program(self._reaper.pid, self._wrapped.program, self._wrapped.wrapper, self._is_ours))

    def _is_ours(self, pid: int) -> bool:
        found = environment(pid)
        return all(found.get(name) == value for name, value in self._wrapped.variables.items())


def _has_ended(program: ProcessHandle) -> bool:
    fd = program.fileno()
    return fd < 0 or readable(fd)


def _is_there(path: str) -> bool:
    return bool(path) and os.path.exists(path)
