"""In the place of `torch.distributed.elastic.multiprocessing.redirects`: a process's own output into a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from rallypoint.base.errors import UserError

if TYPE_CHECKING:
    import ctypes

__all__ = ["get_libc", "redirect", "redirect_stderr", "redirect_stdout"]

_DESCRIPTORS = {"stdout": 1, "stderr": 2}


def get_libc() -> ctypes.CDLL:
    """The C library, whose buffers are flushed before a stream goes elsewhere."""
    import ctypes

    return ctypes.CDLL(None)


@contextmanager
def redirect(std: str, to_file: str) -> Iterator[None]:
    """Inside the `with`, whatever this process and its children write to a stream goes to a file.

    Args:
        std: `stdout` or `stderr`.
        to_file: the file's path; what it held is lost.

    Raises:
        UserError: `std` is neither.
    """
    if std not in _DESCRIPTORS:
        raise UserError(f"{std!r} is not an output stream; redirect one of {', '.join(_DESCRIPTORS)}")
    fd = _DESCRIPTORS[std]
    with open(to_file, "wb") as file:
        before = os.dup(fd)
        try:
            _flush(std)
            os.dup2(file.fileno(), fd)
            try:
                yield
            finally:
                _flush(std)
                os.dup2(before, fd)
        finally:
            os.close(before)


redirect_stdout = partial(redirect, "stdout")
redirect_stderr = partial(redirect, "stderr")


def _flush(std: str) -> None:
    stream = getattr(sys, std)
    if stream is not None:
        stream.flush()
    get_libc().fflush(None)
