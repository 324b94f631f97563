"""The only definition of the version, for the package's build and as `__version__` of `rallypoint`."""

from __future__ import annotations

__version__ = "0.2.0.dev0"
