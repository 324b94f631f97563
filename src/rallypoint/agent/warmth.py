"""Warm starts for the workers of a spec, where it asks for them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rallypoint.agent.environment import constant_environment
from rallypoint.agent.spec import WorkerSpec
from rallypoint.base.log import get_logger
from rallypoint.workers.macros import macros

if TYPE_CHECKING:
    from rallypoint.workers.guardian.client import Guardian
    from rallypoint.workers.warm.starts import WarmStarts

log = get_logger(__name__)


def warm_starts(spec: WorkerSpec, guardian: Guardian) -> WarmStarts | None:
    """Begin to import what the spec wants imported ahead; None if that is nothing, or no workers could be forked."""
    if not spec.warm:
        return None
    if not isinstance(spec.entrypoint, str):
        log.warning("Workers start cold: only scripts are forked from what --warm imports, and these are functions")
        return None
    from rallypoint.workers.warm.starts import WarmStarts

    argv = [spec.entrypoint, *(str(each) for each in macros.substitute(spec.args, "0"))]
    starts = WarmStarts(spec.warm, argv, {**os.environ, **constant_environment(spec, os.environ)})
    starts.prepare(guardian)
    return starts
