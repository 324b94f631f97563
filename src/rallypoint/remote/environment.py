"""The variables of the command on each host. Pure.

Laws:

1. Nothing of the environment here goes along unless it is named; patterns (`NCCL_*`) name what is set here.
2. How the nodes meet is said by `PET_*` variables: flags of the command take precedence by rallyrun's own rules, and
   scripts that call rallyrun need no arguments.
3. What the user gives takes precedence over what is chosen here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from rallypoint.base.errors import UsageError
from rallypoint.base.log import printable
from rallypoint.remote.hosts import Host

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_PATTERN = re.compile(r"[A-Za-z0-9_*?]+", re.ASCII)
DEVICES = "CUDA_VISIBLE_DEVICES"


def named_variables(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that `--env` selects.

    Args:
        words: `NAME`, `NAME=VALUE` or a pattern, each.
        environ: the environment here.

    Raises:
        UsageError: a name is invalid, or is not set here.
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            found[_checked(name, "--env")] = value
        elif {"*", "?"} & set(word) and _PATTERN.fullmatch(word):
            found |= {each: text for each, text in environ.items() if fnmatchcase(each, word)}
        elif _checked(name, "--env") in environ:
            found[name] = environ[name]
        else:
            raise UsageError(f"--env={name}: there is no such variable here; set it, or give its value: {name}=VALUE")
    return found


def file_variables(data: bytes, source: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Read a file of `NAME=VALUE` lines, as `docker run --env-file` does: `#` begins a comment line, values are taken
    as they are, and a line with a name alone takes the value that it has here, if it has one.

    Raises:
        UsageError: a line is neither.
    """
    found: dict[str, str] = {}
    for number, raw in enumerate(data.decode("utf-8", "surrogateescape").split("\n"), 1):
        line = raw.removesuffix("\r")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if "\0" in line:
            raise UsageError(f"{source}, line {number}: no variable can hold a NUL byte; leave it out")
        name, equals, value = line.partition("=")
        name = _checked(name.strip(), f"{source}, line {number}")
        if equals:
            found[name] = value
        elif name in environ:
            found[name] = environ[name]
    return found


def _checked(name: str, source: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{source}: {printable(name)!r} is not a variable's name; write NAME=VALUE")
    return name


def node_variables(hosts: Sequence[Host], rank: int, endpoint: str, run_id: str) -> dict[str, str]:
    """How one node meets the others.

    Args:
        hosts: all of them.
        rank: which of them it is.
        endpoint: where the control plane is.
        run_id: the job's name.
    """
    host = hosts[rank]
    found = {
        "PET_NNODES": str(len(hosts)),
        "PET_NODE_RANK": str(rank),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": endpoint,
        "PET_RDZV_ID": run_id,
    }
    if host.workers is not None:
        found["PET_NPROC_PER_NODE"] = str(host.workers)
    if host.devices is not None:
        found[DEVICES] = ",".join(map(str, host.devices))
    return found
