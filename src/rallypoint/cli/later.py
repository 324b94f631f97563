"""What torchrun can do and this release cannot: refused, and never silently ignored."""

from __future__ import annotations

from rallypoint.base.errors import UserError
from rallypoint.cli.parse import Options

_BACKENDS = frozenset({"etcd", "etcd-v2"})


def refuse_unfinished(options: Options) -> None:
    """Stop at the first flag that asks for what this release cannot do.

    Raises:
        UserError: there is one.
    """
    if options.rdzv_backend in _BACKENDS and not options.standalone:
        source = options.source("rdzv_backend")
        raise UserError(f"{source}={options.rdzv_backend} does not work in this release yet; use c10d or static")
