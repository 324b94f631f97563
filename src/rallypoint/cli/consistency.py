"""Finds values that the user cannot intend: unexpanded shell variables, empty values, flags that contradict
`--standalone`, and flags after the script.

Without these checks, the nodes of a job would have different ids or endpoints, and wait for the join timeout.
"""

from __future__ import annotations

import re
from typing import Any

from rallypoint.base.errors import UsageError, UserError
from rallypoint.base.log import get_logger
from rallypoint.cli.parse import Options, parse_nnodes

_log = get_logger(__name__)

_UNEXPANDED = re.compile(r"\$(?:[A-Za-z_]\w*|\{[^{}]*\}|\([^()]*\))|`[^`]+`", re.ASCII)
"""`$NAME`, `${NAME}`, `$(COMMAND)` (also a Kubernetes variable), and a command in backquotes."""

_PLAIN_TEXTS = (
    *("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "local_addr"),
    *("role", "log_dir", "logs_specs", "event_log_handler", "master_addr"),
    *("incident_dir", "progress_file", "node_domain"),
)
"""Options in which `$` has no meaning here, unlike in templates, filters, commands and the script's arguments."""

_PASSWORD = re.compile(r"\bpassword\s*=[^,]*")

_MEETING = ("rdzv_backend", "rdzv_endpoint", "rdzv_id", "node_rank", "master_addr", "master_port")
"""Options that say where this node meets others, and its rank."""
_OF_STANDALONE = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "node_rank": 0, "master_addr": "localhost"}
"""Values that `--standalone` sets anyway. The defaults are harmless too."""


def consistent(options: Options, late: str) -> Options:
    """Remove the options that `--standalone` overrides, and name them in one line.

    Args:
        options: the options from the command line.
        late: an argument of the script that was probably meant for the launcher; empty for none.

    Raises:
        UserError: the user cannot intend a value.
    """
    values = options.flat()
    for dest in _PLAIN_TEXTS:
        if dest in options.sources:
            refuse_unexpanded(options.source(dest), values[dest])
    if late and not options.no_python:  # the program may be another launcher
        script = options.training_script
        _log.warning("%s comes after %s and is passed to it; put it before %s to use it here", late, script, script)
    return _alone(options, values) if options.standalone else _checked_meeting(options)


def refuse_unexpanded(source: str, value: object) -> None:
    """Raise UsageError if the value contains a variable or a command that no shell or template expanded."""
    text = _PASSWORD.sub("", value) if isinstance(value, str) else ""
    if (found := _UNEXPANDED.search(text)) is not None:
        raise UsageError(
            f"{source}={value!r} contains {found[0]}, which was not expanded; use double quotes instead of single "
            "quotes in a shell, or define the variable in a template"
        )


def _alone(options: Options, values: dict[str, Any]) -> Options:
    """Let `--standalone` win if the other value comes from the environment, or if the job can run without it."""
    changes: dict[str, Any] = {}
    low, high = parse_nnodes(options.nnodes, options.source("nnodes"))
    if high > 1:
        if low > 1 and options.source("nnodes") == "--nnodes":
            raise UsageError(
                f"{_shown(options, values, 'nnodes')} needs {low} nodes, but {options.source('standalone')} runs the "
                "job on this node only; remove one of them"
            )
        changes["nnodes"] = "1:1"
    if values["segment"] != 1 and options.source("segment") == "PET_SEGMENT":
        changes["features"] = options.features._replace(topology=options.features.topology.replace(segment=1))
    overridden = [
        *(["nnodes"] if "nnodes" in changes else []),
        *(["segment"] if "features" in changes else []),
        *(dest for dest in _MEETING if dest in options.sources and not _is_meant(dest, values[dest])),
    ]
    if overridden:
        named = ", ".join(_shown(options, values, dest) for dest in overridden)
        _log.warning("%s runs the job on this node only, so %s has no effect", options.source("standalone"), named)
    return options.replace(**changes) if changes else options


def _is_meant(dest: str, value: object) -> bool:
    default = next(flag.default for flag in Options.flags if flag.dest == dest)
    return value in (default, _OF_STANDALONE.get(dest, default))


def _shown(options: Options, values: dict[str, Any], dest: str) -> str:
    return f"{options.source(dest)}={values[dest]}"


def _checked_meeting(options: Options) -> Options:
    try:
        _, high = parse_nnodes(options.nnodes, options.source("nnodes"))
    except UserError:
        high = 1  # refused later, where the number is used
    if high > 1 and not options.rdzv_id.strip():
        raise UsageError(
            f"{options.source('rdzv_id')} is empty, but the nodes of a job need a common id; set the same id on all "
            "nodes"
        )
    by_address = options.rdzv_backend == "static" and "master_addr" in options.sources
    if high > 1 and "rdzv_endpoint" in options.sources and not options.rdzv_endpoint.strip() and not by_address:
        raise UsageError(
            f"{options.source('rdzv_endpoint')} is empty, so each node would wait at its own address; set it to the "
            "address of one node, the same on all nodes"
        )
    return options
