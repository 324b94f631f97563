# What `rallyctl shim on` copies into an environment, where the line of the .pth file imports it as Python starts. It is
# the finder itself: what that line says is compiled at each start, and this is read from its bytecode. It must do
# without Rallypoint, and under `rallyctl shim run` in any version of Python.
import sys


def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
    """Rallypoint's module, or None for torch's own."""
    if name[:5] != "torch":
        return None
    if not (name.startswith(("torch.distributed.run", "torch.distributed.launch")) or sys.argv[:1] == ["-m"]):
        return None
    import os  # here: a module that has it makes Python's end slower

    if os.environ.get("RALLYPOINT_SHIM") == "0":
        return None
    try:
        import rallypoint.compat.shim
    except ModuleNotFoundError as error:
        if error.name != "rallypoint":
            raise
        return None
    return rallypoint.compat.shim.find(name)


sys.meta_path.insert(0, sys.modules[__name__])
