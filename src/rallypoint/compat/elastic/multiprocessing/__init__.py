"""In the place of `torch.distributed.elastic.multiprocessing`."""

from __future__ import annotations

from rallypoint.compat.also import also
from rallypoint.compat.elastic.multiprocessing.api import *  # noqa: F403 - all that is public there
from rallypoint.compat.elastic.multiprocessing.api import __all__ as __all__

__getattr__ = also(__name__)
