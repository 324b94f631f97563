"""In the place of `torch.distributed.elastic.utils`."""

from __future__ import annotations

from rallypoint.compat.elastic.utils.api import *  # noqa: F403 - all that is public there
from rallypoint.compat.elastic.utils.api import __all__ as __all__
