"""What torchrun can do and this release cannot: refused, or said aloud, but never silently ignored."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rallypoint.base.errors import UserError
from rallypoint.cli.parse import Options

_IDLE: dict[str, tuple[object, ...]] = {
    "run_path": (False,),
    "numa_binding": (None,),
    "logs_specs": (None, "default"),
    "event_log_handler": ("null",),
    "duplicate_stdout_filters": ((),),
    "duplicate_stderr_filters": ((),),
    "virtual_local_rank": (False,),
}
"""Flags whose work comes in a later release, and the values that ask for none of it."""

_BACKENDS = frozenset({"etcd", "etcd-v2"})


def refuse_unfinished(options: Options) -> None:
    """Stop at the first flag that asks for what this release cannot do.

    Raises:
        UserError: there is one.
    """
    for dest, idle in _IDLE.items():
        value = getattr(options, dest)
        if value not in idle:
            written = "" if value is True else f"={value!r}"
            raise UserError(f"{options.source(dest)}{written} does not work in this release yet; leave it out")
    if options.rdzv_backend in _BACKENDS and not options.standalone:
        source = options.source("rdzv_backend")
        raise UserError(f"{source}={options.rdzv_backend} does not work in this release yet; use c10d or static")


def _is_one(text: str) -> bool:
    return text == "1"


def _is_number(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def _is_positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


_SWITCHES: dict[str, tuple[Callable[[str], bool], str]] = {
    "TORCHELASTIC_ENABLE_FILE_TIMER": (_is_one, "no watchdog runs"),
    "TORCHELASTIC_HEALTH_CHECK_PORT": (_is_number, "no health check answers"),
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": (_is_positive, "workers in uninterruptible sleep are not looked for"),
}
"""Variables that switch something on, which texts do (contract sections 5.10 to 5.12), and what is then missing."""


def unfinished_switches(environ: Mapping[str, str]) -> list[str]:
    """One sentence for each variable of `environ` that would switch on what this release cannot do."""
    return [
        f"{name}={environ[name]!r} has no effect in this release yet: {missing}"
        for name, (switches_on, missing) in _SWITCHES.items()
        if name in environ and switches_on(environ[name])
    ]
