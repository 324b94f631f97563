"""In the place of `torch.distributed.launcher.api`."""

from __future__ import annotations

from rallypoint.compat.reexports import reexports_of
from rallypoint.launch.api import elastic_launch, launch_agent
from rallypoint.launch.config import LaunchConfig

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

__getattr__ = reexports_of(__name__)
