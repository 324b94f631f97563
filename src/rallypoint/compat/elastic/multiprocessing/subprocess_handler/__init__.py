"""In the place of `torch.distributed.elastic.multiprocessing.subprocess_handler`."""

from __future__ import annotations

from rallypoint.compat.elastic.multiprocessing.subprocess_handler.handlers import get_subprocess_handler
from rallypoint.compat.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

__all__ = ["SubprocessHandler", "get_subprocess_handler"]
