# Loaded where this folder is the first of PYTHONPATH: under `rallyctl shim run`, by any version of Python.
import os
import sys

import rallypoint_shim  # type: ignore[import-not-found] # noqa: F401

# Be the user's own sitecustomize, or Python's, which this one has hidden.
_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _here]
del sys.modules["sitecustomize"]
__import__("sitecustomize")  # where there is none, Python expects just this ImportError
