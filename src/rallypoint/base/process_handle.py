"""The handle of a process: readable once the process ends. Signals sent through it reach no other process.

`base.open_process` creates handles. Without pidfds, `base.without_pidfds` provides them and lists the drawbacks.
"""

from __future__ import annotations

import os
import signal


class ProcessHandle:
    """A process with its pidfd.

    Args:
        pid: the pid, for messages.
        fd: its pidfd, which this object closes.
    """

    def __init__(self, pid: int, fd: int) -> None:
        self.pid = pid
        self._fd = fd

    def fileno(self) -> int:
        """A descriptor that becomes readable when the process ends; -1 after `close`."""
        return self._fd

    def send_signal(self, number: int) -> None:
        """Send a signal. Raises OSError if the process has ended, or if we may not signal its user's processes."""
        signal.pidfd_send_signal(self._fd, number)

    def outlives_reaper(self) -> bool:
        """Whether the process is still running although its descriptor is readable, since its reaper is lost."""
        return False

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
