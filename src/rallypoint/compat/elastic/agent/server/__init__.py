"""In the place of `torch.distributed.elastic.agent.server`."""

from __future__ import annotations

from rallypoint.compat.elastic.agent.server import api
from rallypoint.compat.elastic.agent.server.api import *  # noqa: F403 - all that is public there
from rallypoint.compat.elastic.agent.server.local_elastic_agent import (
    TORCHELASTIC_ENABLE_FILE_TIMER,
    TORCHELASTIC_TIMER_FILE,
)

__all__ = [*api.__all__, "TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_TIMER_FILE"]  # noqa: PLE0604
