# What `rallyctl shim on` copies into an environment beside the .pth file, whose line asks this for modules of torch. It
# must do without Rallypoint, and under `rallyctl shim run` in any version of Python.
import os
import sys


def find(name):  # type: ignore[no-untyped-def]
    """Rallypoint's module, or None for torch's own."""
    if not (name.startswith(("torch.distributed.run", "torch.distributed.launch")) or sys.argv[:1] == ["-m"]):
        return None
    if os.environ.get("RALLYPOINT_SHIM") == "0":
        return None
    try:
        import rallypoint.compat.shim  # not from rallypoint.compat: it would ask torch for such a name
    except ModuleNotFoundError as error:
        if error.name != "rallypoint":
            raise
        return None
    return rallypoint.compat.shim.find(name)
