"""In the place of `torch.distributed.launcher`."""

from __future__ import annotations

from rallypoint.compat.launcher.api import LaunchConfig, elastic_launch, launch_agent

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]
