"""Checks that gevent has not replaced threads, which an agent needs."""

from __future__ import annotations

import sys

from rallypoint.base.errors import UserError


def check_threads() -> None:
    """Raise UserError if gevent replaced threads, or the functions that wait for descriptors."""
    monkey = sys.modules["gevent.monkey"]
    replaced = [name for name in ("threading", "select", "signal") if monkey.is_module_patched(name)]
    if replaced:
        raise UserError(
            f"gevent has replaced {', '.join(replaced)} in this process (gevent.monkey), but the launcher needs real "
            "threads; start the launcher without gevent, and call gevent.monkey.patch_all() in the workers' program"
        )
