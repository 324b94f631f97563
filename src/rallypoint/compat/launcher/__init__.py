"""In the place of `torch.distributed.launcher`."""

from __future__ import annotations

from rallypoint.compat.launcher.api import *  # noqa: F403 - all that is public there
from rallypoint.compat.launcher.api import __all__ as __all__
