"""The one place where all parts are put together: a `LaunchConfig` in, a running job out."""

import sys

if sys.platform == "win32":
    from rallypoint.base.errors import NOT_ON_WINDOWS

    raise ImportError(NOT_ON_WINDOWS)
