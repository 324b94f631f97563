"""Chooses the workers' Python if the active environment differs from the launcher's (docs/how-to/environments.md).

The rule, without `PYTHON_EXEC`:

1. Workers run the launcher's own Python, as with torchrun.
2. But if the launcher has no torch, workers run the active environment's Python, provided that this has torch, or that
   the launcher was installed as a tool, alone in its own environment (`uv tool`, `pipx`).
3. If both have torch, one line says which Python runs, and how to choose.

The module only looks for files; it imports and starts nothing. A torch on PYTHONPATH belongs to no environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping

from rallypoint.base.log import get_logger
from rallypoint.base.procfs import read_text
from rallypoint.failures.explanation import TOOL_FILES

_log = get_logger(__name__)

_PACKAGES = ("site-packages", "dist-packages")
_SYSTEM_PACKAGES = ("lib", "lib64", "local/lib")


def worker_python(environ: Mapping[str, str]) -> str:
    """Choose the workers' interpreter, without `PYTHON_EXEC`. Logs one line if the choice is not obvious."""
    is_tool = any(os.path.exists(f"{sys.prefix}/{name}") for name in TOOL_FILES)
    has_torch: bool | None = None
    for variable, prefix in _active(environ):
        if os.path.realpath(prefix) == os.path.realpath(sys.prefix):
            break  # the launcher is part of the active environment
        python = _python_of(prefix)
        if not python:
            continue
        if has_torch is None:
            has_torch = _launcher_has_torch(environ)
        there = _has_torch(prefix)
        if not has_torch and (there or is_tool):
            _log.warning(
                "workers run %s, the Python of %s=%s, because the launcher's own (%s) has no torch; set PYTHON_EXEC to "
                "choose another",
                *(python, variable, environ[variable], sys.executable),
            )
            return python
        if has_torch and there:
            _log.warning(
                "workers run %s, the launcher's own Python, but %s=%s has torch too; set PYTHON_EXEC=%s to use that "
                "Python, or PYTHON_EXEC=%s to keep the launcher's",
                *(sys.executable, variable, environ[variable], python, sys.executable),
            )
            break
    return sys.executable


def _active(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Variables that name an environment, and its folder; innermost environment first."""
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if environ.get(variable):
            yield variable, environ[variable]
    if named := environ.get("UV_PROJECT_ENVIRONMENT"):
        yield "UV_PROJECT_ENVIRONMENT", _of_project(named)


def _of_project(named: str) -> str:
    """The folder of uv's environment, relative to the project's folder, which might be above the current one."""
    here = folder = os.getcwd()
    while True:
        found = os.path.join(folder, named)
        if os.path.exists(f"{folder}/pyproject.toml") and _python_of(found):
            return found
        if folder == os.path.dirname(folder):
            return os.path.join(here, named)
        folder = os.path.dirname(folder)


def _python_of(prefix: str) -> str:
    """The interpreter of an environment; empty if it has none that works."""
    paths = (os.path.abspath(f"{prefix}/bin/{name}") for name in ("python", "python3"))
    return next((path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)), "")


def _launcher_has_torch(environ: Mapping[str, str]) -> bool:
    from importlib.util import find_spec

    try:
        spec = find_spec("torch")
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None:  # nothing, or just a folder with that name
        return False
    shared = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    return not any(spec.origin.startswith(os.path.join(os.path.abspath(folder), "torch/")) for folder in shared)


def _has_torch(prefix: str) -> bool:
    """Whether an environment contains torch, or sees the torch of the Python that created it."""
    if any(map(_holds_torch, _package_folders(prefix, ("lib",)))):
        return True
    config = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition("=") for line in read_text(f"{prefix}/pyvenv.cfg").splitlines())
    }
    if config.get("include-system-site-packages", "").lower() != "true" or "home" not in config:
        return False
    return any(map(_holds_torch, _package_folders(os.path.dirname(config["home"]), _SYSTEM_PACKAGES)))


def _package_folders(prefix: str, libraries: tuple[str, ...]) -> Iterator[str]:
    for library in (f"{prefix}/{name}" for name in libraries):
        for name in _names(library):
            if name.startswith("python3"):
                yield from (f"{library}/{name}/{packages}" for packages in _PACKAGES)


def _holds_torch(folder: str) -> bool:
    """Whether a folder contains torch, or only its metadata, as after installing from a checkout."""
    return os.path.exists(f"{folder}/torch/__init__.py") or any(
        name.startswith("torch-") and name.endswith((".dist-info", ".egg-info")) for name in _names(folder)
    )


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
