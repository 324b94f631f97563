"""Turns an interpreter into a zygote when imported in its `site` phase, from the first folder on PYTHONPATH.

Any error here ends the process: continuing would run the user's script outside a round. In a copy that became a worker
the call returns, the real `sitecustomize` (if any) replaces this module, and the interpreter continues to the script as
usual. The code must be valid in every version of Python.
"""

import os
import sys


def _serve():
    # type: () -> None
    packages = (
        "rallypoint",
        "rallypoint.features",
        "rallypoint.features.preload",
        "rallypoint.workers",
        "rallypoint.workers.reaper",
    )
    hook = os.path.dirname(os.path.abspath(__file__))
    top = os.path.dirname(os.path.dirname(os.path.dirname(hook)))
    sys.path[:] = [folder for folder in sys.path if folder != hook]
    finders = dict(sys.path_importer_cache)
    del finders[hook]
    there = _take_ours()
    # The packages are empty here: loading them takes long, and the worker must not see them.
    for name in packages:
        package = type(sys)(name)
        package.__path__ = [os.path.join(top, *name.split(".")[1:])]
        sys.modules[name] = package
    from rallypoint.features.preload.zygote import serve

    _take_ours()
    sys.path_importer_cache.clear()
    sys.path_importer_cache.update(finders)
    sys.modules.update(there)  # type: ignore[arg-type]
    serve()


def _take_ours():
    # type: () -> dict[str, object]
    names = [name for name in sys.modules if name == "rallypoint" or name.startswith("rallypoint.")]
    return {name: sys.modules.pop(name) for name in names}


try:
    if sys.version_info < (3, 10):  # noqa: UP036 - any interpreter may come here
        raise RuntimeError("this interpreter is older than Python 3.10")
    _serve()
except BaseException as error:
    try:
        os.write(2, ("%s: %s" % (type(error).__name__, error)).encode())  # noqa: UP031 - in any Python
    finally:
        os._exit(70)

# From here on this is a worker. The entry of `sys.modules` under our name at the end is the imported module.
del sys.modules["sitecustomize"]
__import__("sitecustomize")  # the real one; `site` gets the ImportError if there is none
