"""A name for this process that no other process has or can guess."""

from __future__ import annotations

import os

_token = b""


def process_token() -> bytes:
    """16 random bytes, constant during this process's life. A pid is not unique: if containers share a network, each
    may have a process 1 at the same address.
    """
    global _token
    if not _token:
        _token = os.urandom(16)
    return _token


def _forget() -> None:
    global _token
    _token = b""


os.register_at_fork(after_in_child=_forget)
