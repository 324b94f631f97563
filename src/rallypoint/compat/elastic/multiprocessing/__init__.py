"""In the place of `torch.distributed.elastic.multiprocessing`."""

from __future__ import annotations

from rallypoint.compat.elastic.multiprocessing.api import *  # noqa: F403 - all that is public there
from rallypoint.compat.elastic.multiprocessing.api import __all__ as __all__
from rallypoint.compat.reexports import reexports_of

__getattr__ = reexports_of(__name__)
