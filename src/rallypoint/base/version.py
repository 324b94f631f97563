"""The only definition of the version. The package is built with it, and it is `__version__` of `rallypoint`."""

from __future__ import annotations

__version__ = "0.2.0.dev0"
