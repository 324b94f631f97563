"""The only place where the version stands. The package is built with it, and `__version__` of `rallypoint` is it."""

from __future__ import annotations

__version__ = "0.1.0"
