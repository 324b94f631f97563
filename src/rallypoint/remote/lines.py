"""The output of a host as whole lines, each behind the host's name. Pure: bytes in, bytes out.

Laws:

1. Bytes are never decoded, and nothing is lost or reordered.
2. A line of more than `LONGEST` bytes is cut into several, so that memory is bounded.
3. A progress bar (a line with carriage returns) is not kept until it ends: `progress_bar` shows it so far.
"""

from __future__ import annotations

LONGEST = 64 * 1024


class PrefixedLines:
    """One stream of one host.

    Args:
        prefix: what each line begins with.
        mark: what stands before the last message of the stream, which is no line.
    """

    def __init__(self, prefix: bytes, mark: bytes = b"") -> None:
        self._prefix = prefix
        self._mark = mark
        self._rest = bytearray()
        self.received = 0
        """Bytes that have come."""
        self._end_at = -1
        """Where the last message begins in the rest; -1 while it has not come."""

    def feed(self, data: bytes) -> bytes:
        """What can be shown now."""
        self._rest += data
        self.received += len(data)
        if self._end_at < 0 and self._mark:
            self._end_at = self._rest.find(self._mark)
        if self._end_at >= 0:
            return b""
        whole = self._rest.rfind(b"\n") + 1
        out = self._show(self._take(whole)[:-1]) if whole else b""
        while len(self._rest) >= LONGEST + len(self._mark):  # the mark may have begun to come
            out += self._show(self._take(LONGEST))
        return out

    @property
    def has_progress_bar(self) -> bool:
        """Whether a line that has not ended has been drawn over."""
        return self._end_at < 0 and b"\r" in self._rest

    def progress_bar(self) -> bytes:
        """A line that has not ended, as far as it was drawn over, as a line of its own."""
        drawn = self._rest.rfind(b"\r") + 1
        return self._show(self._take(drawn)) if drawn and self._end_at < 0 else b""

    def finish(self) -> tuple[bytes, bytes]:
        """What is left of the lines, and what stands behind the mark; empty if that has not come."""
        rest = bytes(self._rest)
        self._rest.clear()
        if self._end_at < 0:
            return self._show(rest) if rest else b"", b""
        shown, last = rest[: self._end_at], rest[self._end_at + len(self._mark) :]
        return self._show(shown.removesuffix(b"\n")) if shown else b"", last

    @property
    def last_size(self) -> int:
        """Bytes of the last message that have come."""
        return len(self._rest) - self._end_at - len(self._mark) if self._end_at >= 0 else 0

    def _take(self, count: int) -> bytes:
        taken = bytes(self._rest[:count])
        del self._rest[:count]
        return taken

    def _show(self, text: bytes) -> bytes:
        return self._prefix + text.replace(b"\n", b"\n" + self._prefix) + b"\n"
