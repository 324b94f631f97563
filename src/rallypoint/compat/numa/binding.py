"""In the place of `torch.numa.binding`."""

from __future__ import annotations

from rallypoint.base.numa import AffinityMode, NumaOptions

__all__ = ["AffinityMode", "NumaOptions"]
