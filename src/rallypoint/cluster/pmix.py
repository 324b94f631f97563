"""`python -m rallypoint.cluster.pmix NAMESPACE`: the host of rank 0, as PMIx has it, on standard output.

It runs in a process of its own: the library starts threads, and a defect of it must not be the agent's. Structures and
keys are those of the PMIx standard, versions 2 to 5.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys

_LIBRARY = "libpmix.so.2"
_HOSTNAME = b"pmix.hname"
_STRING = 3
_SUCCESS = 0


class Process(ctypes.Structure):
    """`pmix_proc_t`."""

    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class Value(ctypes.Structure):
    """`pmix_value_t` of a string."""

    _fields_ = (("type", ctypes.c_uint16), ("string", ctypes.c_char_p))


def _library() -> ctypes.CDLL:
    """The library of the system, or the one next to `mpirun`."""
    launcher = shutil.which("mpirun") or "/usr/bin/mpirun"
    beside = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(launcher))), "lib", _LIBRARY)
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return ctypes.CDLL(beside)


def host_of_rank_0(namespace: str) -> str:
    """Ask the PMIx server that has started this process's parent; empty if it does not know.

    Raises:
        OSError: there is no such library, or the server cannot be reached.
    """
    library = _library()
    me = Process()
    if library.PMIx_Init(ctypes.byref(me), None, ctypes.c_size_t(0)) != _SUCCESS:
        raise OSError("no PMIx server answers")
    try:
        value = ctypes.POINTER(Value)()
        first = Process(namespace.encode()[:255] or me.nspace, 0)
        done = library.PMIx_Get(ctypes.byref(first), _HOSTNAME, None, ctypes.c_size_t(0), ctypes.byref(value))
        if done != _SUCCESS or value.contents.type != _STRING:
            return ""
        return (value.contents.string or b"").decode("ascii", "replace")
    finally:
        library.PMIx_Finalize(None, ctypes.c_size_t(0))


if __name__ == "__main__":
    try:
        print(host_of_rank_0(sys.argv[1] if len(sys.argv) > 1 else ""))
    except (OSError, AttributeError) as error:
        sys.exit(f"rallypoint: {error}")
