"""Handlers of events of a third party, written for torch: lines go to the file that KEPT names."""

import logging
import os
from typing import Any

from torch.distributed.elastic.events.handlers import _log_handlers


class Kept(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        with open(os.environ["KEPT"], "a") as file:
            file.write(record.getMessage() + "\n")


_log_handlers["kept"] = Kept()
_log_handlers["dynamic_rendezvous"] = Kept()


def offer() -> Any:
    """What torch loads at its start, so that the lines above are run; there is no rendezvous behind it."""
    return None
