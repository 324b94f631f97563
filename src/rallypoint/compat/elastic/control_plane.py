"""In the place of `torch.distributed.elastic.control_plane`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from rallypoint.base.log import get_logger
from rallypoint.failures.record import record

__all__ = ["TORCH_WORKER_SERVER_SOCKET", "worker_main"]

log = get_logger(__name__)

TORCH_WORKER_SERVER_SOCKET = "TORCH_WORKER_SERVER_SOCKET"


@contextmanager
def worker_main() -> Iterator[None]:
    """Put it around a worker's main part: `with worker_main(): ...`. `record` records the exception that ends it.

    torch's also serves debugging requests on the socket that `TORCH_WORKER_SERVER_SOCKET` names; this one does not.
    """
    if os.environ.get(TORCH_WORKER_SERVER_SOCKET):
        log.warning("%s is set, but Rallypoint serves no debugging requests there", TORCH_WORKER_SERVER_SOCKET)
    try:
        yield
    except Exception as error:
        record(_raise)(error)


def _raise(error: Exception) -> NoReturn:
    raise error
