"""Builds the store in C (`src/rallypoint/store/native`) into the package: `python build_native.py`.

Installing does it too (`hatch_build.py`). It needs a C compiler (`CC`, else the one that Python was built with) and the
headers of Python; where they are missing nothing is built, and the store in Python serves.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

STORE = Path(__file__).resolve().parent / "src" / "rallypoint" / "store"
SOURCES = STORE / "native"
BUILT = STORE / "_native.abi3.so"
"""Built for the stable interface of Python 3.11: every later version takes it."""

_FLAGS = [
    *("-std=c11", "-O2", "-g", "-Wall", "-Wextra", "-fPIC", "-shared", "-fvisibility=hidden"),
    "-DPy_LIMITED_API=0x030B0000",
    "-Wno-cast-function-type",  # as Python's own tables of methods need it
    # Bytes of unauthenticated peers are read here: an overrun ends the process, and nobody gains by it.
    *("-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"),
    *("-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack"),
]


class NotBuiltError(Exception):
    """Nothing was built; the text says why."""


def digest() -> str:
    """What tells one state of the sources from another; the module that is built from them knows it as `SOURCES`."""
    seen = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.[ch]")):
        seen.update(f"{path.name}\n".encode() + path.read_bytes())
    return seen.hexdigest()[:16]


def compiler() -> list[str]:
    """The command line's beginning. Raises NotBuiltError where nothing could be built for."""
    if sys.platform != "linux" or sys.implementation.name != "cpython":
        raise NotBuiltError(f"it is for CPython on Linux, and this is {sys.implementation.name} on {sys.platform}")
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        raise NotBuiltError(f"the headers of Python are not installed ({include}/Python.h)")
    command = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    return [*command, f"-I{include}"]


def build(target: Path = BUILT, *flags: str) -> Path:
    """Build the module.

    Args:
        target: where it is to lie.
        flags: more of them for the compiler.

    Raises:
        NotBuiltError: there is no compiler, or it failed; what was at `target` is then removed.
    """
    new = target.absolute().with_suffix(f".{os.getpid()}.new")
    sources = sorted(path.name for path in SOURCES.glob("*.c"))
    # The folder of the build is not in the result, so that two builds of the same sources are the same bytes.
    flags = (f"-ffile-prefix-map={SOURCES}=.", *flags)
    try:
        _run([*compiler(), *_FLAGS, f'-DSOURCES="{digest()}"', *flags, *sources, "-o", str(new)])
    except NotBuiltError:
        new.unlink(missing_ok=True)
        target.unlink(missing_ok=True)
        raise
    new.replace(target)
    return target


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, cwd=SOURCES, check=True, capture_output=True, text=True)
    except OSError as error:
        raise NotBuiltError(f"the compiler {command[0]!r} cannot be run: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        words = error.stderr.strip() or f"exit code {error.returncode}"
        raise NotBuiltError(f"the compiler {command[0]!r} failed: {words}") from None


if __name__ == "__main__":
    try:
        print(f"built {build()}")
    except NotBuiltError as error:
        sys.exit(f"the store in C was not built: {error}")
