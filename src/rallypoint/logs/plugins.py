"""Log specs of third parties, from the entry-point group that torch's launcher uses too (contract section 1.11)."""

from __future__ import annotations

from typing import Any

from rallypoint.base.errors import UserError
from rallypoint.base.log import get_logger
from rallypoint.base.plugins import entry_point, entry_point_names
from rallypoint.logs.specs import LogsSpecs

GROUP = "torchrun.logs_specs"
DEFAULT = "default"

_log = get_logger(__name__)


def plugin_specs(name: str, **arguments: Any) -> LogsSpecs:
    """Log specs of a class that an installed package offers, called with `arguments` (see `LogsSpecs`).

    Raises:
        UserError: nobody offers the name, or what is offered does not work.
    """
    try:
        offer = entry_point(GROUP, name)
        specs = None if offer is None else offer(**arguments)
    except Exception as error:  # somebody else's code, which may fail in any way
        _log.info("the log specs %r failed", name, exc_info=True)
        raise UserError(
            f"the log specs {name!r} cannot be made ({type(error).__name__}: {error}); look at the package that offers "
            f"them in the entry-point group {GROUP}, LOGLEVEL=INFO shows the traceback"
        ) from error
    if offer is None:
        known = ", ".join(sorted({DEFAULT, *entry_point_names(GROUP)}))
        raise UserError(f"no installed package offers the log specs {name!r}; use one of {known}")
    if not isinstance(specs, LogsSpecs):
        raise UserError(
            f"the log specs {name!r} are a {type(specs).__module__}.{type(specs).__qualname__}, which is no LogsSpecs "
            "of Rallypoint; where they are written for torch, have them import it from Rallypoint instead"
        )
    return specs
