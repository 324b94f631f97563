"""In the place of `torch.distributed.elastic.rendezvous`."""

from __future__ import annotations

from rallypoint.compat.elastic.rendezvous.api import *  # noqa: F403 - all that is public there
from rallypoint.compat.elastic.rendezvous.api import __all__ as __all__
