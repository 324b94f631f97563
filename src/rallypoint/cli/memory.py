"""Releases the memory that only the start needed."""

from __future__ import annotations

from collections.abc import Iterator

_MADV_DONTNEED = 4


def trim_memory() -> None:
    """Unmap the interpreter's code: it is clean and in the page cache, from which needed pages come back."""
    import ctypes

    madvise = ctypes.CDLL(None).madvise
    try:
        # The interpreter itself is the largest: last, since code that runs afterwards is mapped again.
        mappings = sorted(_clean_mappings(), key=lambda each: each[1] - each[0])
    except OSError:  # the file is not on every kernel
        return
    for start, end in mappings:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def _clean_mappings() -> Iterator[tuple[int, int]]:
    """Start and end of mapped files that are read-only and unmodified."""
    mapping: tuple[int, int] | None = None
    with open("/proc/self/smaps", "rb") as lines:
        for line in lines:
            fields = line.split()
            if len(fields) > 4 and b"-" in fields[0]:
                named = len(fields) > 5 and fields[1] in (b"r-xp", b"r--p") and fields[5].startswith(b"/")
                start, end = (int(each, 16) for each in fields[0].split(b"-"))
                mapping = (start, end) if named else None
            elif mapping is not None and fields[:2] == [b"Anonymous:", b"0"]:
                yield mapping
