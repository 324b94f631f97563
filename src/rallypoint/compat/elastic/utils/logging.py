"""In the place of `torch.distributed.elastic.utils.logging`."""

from __future__ import annotations

import logging
import sys

from rallypoint.base.log import log_level
from rallypoint.compat.reexports import reexports_of

__all__ = ["get_logger"]

__getattr__ = reexports_of(__name__)


def get_logger(name: str | None = None) -> logging.Logger:
    """A logger at the level that `LOGLEVEL` names, or WARNING.

    Args:
        name: of the logger; None for the name of the module that asks.

    Raises:
        UserError: `LOGLEVEL` names no level.
    """
    logger = logging.getLogger(name or str(sys._getframe(1).f_globals.get("__name__", "")))
    logger.setLevel(log_level())
    return logger
